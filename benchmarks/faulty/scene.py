"""Where a fault is done: a running job on test hosts, one host of them, and what is there to do it to."""

import contextlib
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from tests.cluster.jobs import agents, guardians
from tests.testhosts.hosts import Driver, Host, Process, TestHosts
from tests.testhosts.keeper import network_of, processes_in_network
from tests.testhosts.places import SSHD_PROGRAMS, read_process

__all__ = ["Missed", "Pool", "Reader", "Scene", "left_on", "until"]

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds until there must be something to do a fault to."""
LOOK = 0.03


class Missed(Exception):
    """There was nothing to do the fault to: the job had ended, or never had such a process."""


def until(condition: Callable[[], T | None], seconds: float) -> T | None:
    """What the condition says as soon as it is true; None where it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK)
    return answer


class Pool:
    """The hosts that an elastic job may use, as its discovery script prints them: a shell script, which may misbehave."""

    def __init__(self, folder: Path, slots: dict[str, int]) -> None:
        self._folder = folder
        self._slots = slots
        self._there = dict.fromkeys(slots)
        self.command = f"sh {folder}/discover.sh"
        self.write()

    def write(self, script: str | None = None) -> None:
        """The script from now on; by default the one that does what it should. {pool} is what that prints."""
        pool = "".join(f"{name}:{self._slots[name]}\n" for name in self._there)
        self._replace("pool", pool)
        self._replace("discover.sh", (script or "cat {pool}").replace("{pool}", str(self._folder / "pool")))

    def leave(self, name: str) -> None:
        self._there.pop(name)
        self.write()

    def join(self, name: str) -> None:
        """As the last one."""
        self._there[name] = None
        self.write()

    def _replace(self, name: str, text: str) -> None:
        new = self._folder / f"{name}.new"
        new.write_text(text)
        new.replace(self._folder / name)


class Reader(Thread):
    """Reads a stream to `text`. `pace` is how many bytes it takes in a second: None for all, 0 for none."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._fd = os.dup(stream.fileno())
        stream.close()
        self._parts: list[bytes] = []
        self.pace: int | None = None
        self.is_closed = False
        self.start()

    @property
    def text(self) -> bytes:
        return b"".join(self._parts)

    def close(self) -> None:
        """Hang up."""
        self.is_closed = True

    def run(self) -> None:
        while not self.is_closed:
            pace = self.pace
            if pace == 0 or not select.select([self._fd], [], [], 0.1)[0]:
                time.sleep(0.05)
                continue
            data = os.read(self._fd, 1 << 16 if pace is None else pace // 20)
            if not data:
                break
            self._parts.append(data)
            time.sleep(0.05 if pace else 0.0)
        os.close(self._fd)


@dataclass
class Scene:
    """A job, and the host on which the fault is done. What is done to it is undone when `undo` is closed.

    `mark` is in the command line of each of the job's workers. `caused` is when that happened which is to end the job,
    if a fault says so itself; else it is the moment when the fault was done.
    """

    hosts: TestHosts
    host: Host
    job: "subprocess.Popen[Any]"
    folder: Path
    mark: str
    random: random.Random
    used: Sequence[Host] = ()
    """The hosts of the job."""
    pool: Pool | None = None
    """Of an elastic job."""
    readers: Mapping[str, Reader] = field(default_factory=dict)
    """Of hvlaunch's stdout and stderr."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    caused: float | None = None
    codes: set[int] = field(default_factory=set)
    """What else it may end with, after what was done."""

    def find(self, choose: Callable[["Scene"], Sequence[Process]]) -> Sequence[Process]:
        """What is chosen, as soon as there is some. Raises Missed."""
        found: Sequence[Process] = ()

        def there() -> bool:
            nonlocal found
            found = choose(self)
            return bool(found) or self.job.poll() is not None

        until(there, PATIENCE)
        if not found:
            raise Missed("there is nothing to do it to")
        return found

    def kill(self, name: str, processes: Sequence[Process], host: Host | None = None) -> None:
        """Send a signal. Raises Missed where none of them is there any more."""
        pids = [str(one.pid) for one in processes]
        if (host or self.host).run(["kill", f"-{name}", "--", *pids]).returncode and len(pids) == 1:
            raise Missed("it has just ended")

    def send(self, number: int) -> None:
        """A signal to hvlaunch."""
        if self.job.poll() is not None:
            raise Missed("the job has ended")
        os.kill(self.job.pid, number)

    def stop(self) -> None:
        """Ask the job to end: from now on the time counts that it takes."""
        self.caused = time.monotonic()
        self.send(signal.SIGTERM)

    def ends(self, seconds: float) -> bool:
        """Wait for the end of the job."""
        return until(lambda: self.job.poll() is not None, seconds) is not None

    def pause(self, least: float, most: float | None = None) -> None:
        """Sleep, for a random time if there are two."""
        time.sleep(least if most is None else self.random.uniform(least, most))

    def order(self, verb: str, workers: str = "all") -> None:
        """Tell one worker, or all, what to do: see worker.py."""
        new = self.folder / f"new.{workers}"
        new.write_text(verb)
        new.replace(self.folder / f"order.{workers}")

    def obeyed(self, worker: str) -> bool:
        """Wait until the worker has taken the order."""
        return until(lambda: not (self.folder / f"order.{worker}").exists(), PATIENCE) is not None

    @property
    def another(self) -> Host:
        """A host of the job where the fault is not done."""
        return next(host for host in self.used if host is not self.host)

    def fill_disk(self) -> None:
        """No room is left where hvlaunch writes its files."""
        fill = self.folder / "disk" / "fill"  # as the driver place sees it: a small file system of its own
        self.hosts.driver.run(["sh", "-c", 'head -c 4000000 /dev/zero > "$1"', "sh", str(fill)])

    # Processes of the job; those of a host as the host counts them

    def workers(self) -> list[Process]:
        return [one for one in self.host.user_processes() if self.mark in one.argv]

    def agents(self) -> list[Process]:
        return agents(self.host.user_processes())

    def guardians(self) -> list[Process]:
        return guardians(self.host.user_processes())

    def pythons(self) -> list[Process]:
        return [one for one in self.host.user_processes() if "python" in Path(one.exe).name]

    def sessions(self) -> list[Process]:
        """The sshd of each connection to the host."""
        return [one for one in self.host.processes() if Path(one.exe).name in SSHD_PROGRAMS]

    def on_driver(self, name: str) -> list[Process]:
        """Children of hvlaunch with that program."""
        return [
            one
            for one in self.hosts.driver.processes()
            if Path(one.exe).name == name and self._is_below(one, self.job.pid)
        ]

    def _is_below(self, process: Process, pid: int) -> bool:
        everyone = {one.pid: one for one in self.hosts.driver.processes()}
        at: Process | None = process
        while at is not None and at.ppid != pid:
            at = everyone.get(at.ppid)
        return at is not None


def left_on(place: Host | Driver) -> Iterator[Process]:
    """What runs there, as this machine sees it: a host whose /proc is gone hides nothing."""
    if not place.pid:
        return
    for pid in sorted(processes_in_network(network_of(place.pid))):
        process = read_process(Path("/proc"), pid)
        if process and pid != place.pid and Path(process.exe).name not in SSHD_PROGRAMS:
            yield process
