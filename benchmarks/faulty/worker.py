"""A worker of faults.py: prints numbered lines until FOLDER/end is there, and notes how many it has written.

    worker.py FOLDER [--asks | --meets]

With a child in a session of its own that is no Python. In the process (--asks) it trains as tests/cluster's elastic_sums.py does;
--meets uses the rendezvous. FOLDER/order.HOST.SLOT tells it what to do; it removes the file when it begins to.
"""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

FOLDER = sys.argv[1]
NAME = os.environ["HVLAUNCH_WORKER"].replace("/", ".")
PAUSE = 0.04
PAD = "." * 40


class Lines:
    """The lines; `count` of them have been written. The note of that outlives the worker, however it ends."""

    def __init__(self) -> None:
        fd = os.open(f"{FOLDER}/lines.{NAME}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 8)
        self._note = mmap.mmap(fd, 8)
        self._lock = threading.Lock()
        self.count = 0
        self.mute = False

    def say(self, text: str, **_: object) -> None:
        """One line, whole beside those of other threads."""
        data = f"{text}\n".encode()
        with self._lock:
            while data:
                data = data[os.write(1, data) :]

    def print(self, pad: str = PAD) -> None:
        if self.mute:
            return
        self.say(f"{NAME} line {self.count} {pad}")
        self.count += 1
        self._note[:] = self.count.to_bytes(8, "little")


def obey(lines: Lines) -> None:
    slot = NAME.rpartition(".")[0]
    for name in (slot, "all"):
        try:
            with open(f"{FOLDER}/order.{name}") as file:  # noqa: PTH123 (pathlib costs start-up time)
                verb, *more = file.read().split()
        except FileNotFoundError:
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{FOLDER}/order.{name}")  # noqa: PTH108
        do(verb, more, lines)


def do(verb: str, more: "list[str]", lines: Lines) -> None:
    if verb == "exit":
        os._exit(int(more[0]))
    elif verb == "memory":
        os.write(2, b"MemoryError: no more\n")
        os._exit(1)
    elif verb == "mute":
        lines.mute = True
        os.close(1)
        os.close(2)
    elif verb == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    elif verb == "children":
        deaf = "trap '' TERM INT HUP; sleep 3600 & sleep 3600"
        for _ in range(30):
            subprocess.Popen(["setsid", "sh", "-c", deaf])
    elif verb == "bomb":
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                os.fork()
            time.sleep(0.01)
    elif verb == "flood":
        for _ in range(20_000):
            lines.print("=" * 1000)
    elif verb == "yes":
        while True:
            lines.print("y")
    elif verb == "long":
        lines.say("x" * 3_000_000)
    elif verb == "eat":
        kept = []
        while True:
            kept.append(os.urandom(1 << 20))


def work(lines: Lines) -> None:
    while not os.path.exists(f"{FOLDER}/end"):  # noqa: PTH110
        lines.print()
        obey(lines)
        time.sleep(PAUSE)


def ask(lines: Lines) -> None:
    """Train, while a thread prints."""
    sys.path.insert(0, os.environ["FAULTS_PROGRAMS"])
    elastic_sums: Any = __import__("elastic_sums")
    elastic_sums.STEP = 0.1
    elastic_sums.print = lines.say
    threading.Thread(target=work, args=(lines,), daemon=True).start()
    with elastic_sums.Client.from_environment() as client:
        orders = elastic_sums.Orders(elastic_sums.Path(FOLDER))
        elastic_sums.in_process(client, elastic_sums.Training(orders))


def meet(lines: Lines) -> None:
    """Print, and write a number at the rendezvous from time to time that must be there the next time."""
    from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (only here)

    with Client.from_environment() as client:
        while not os.path.exists(f"{FOLDER}/end"):  # noqa: PTH110
            before = lines.count
            client.put("faults", NAME, str(before).encode())
            for _ in range(10):
                lines.print()
                obey(lines)
                time.sleep(PAUSE)
            assert client.get("faults", NAME) == str(before).encode()


def main() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["setsid", "sleep", "3600"])
    lines = Lines()
    (ask if "--asks" in sys.argv else meet if "--meets" in sys.argv else work)(lines)
    if not lines.mute:
        os.write(1, f"{NAME} end {lines.count}\n".encode())


main()
