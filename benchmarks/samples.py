"""What it costs to know what a job is doing: a host's observer at 1 Hz, the driver with very many hosts, and nobody looking.

    python benchmarks/samples.py                      # 8 workers with 4 children each; 1,000 simulated hosts x 8
    python benchmarks/samples.py --seconds 300

CPU time, so a busy machine changes little. The start of an observer is told by itself. The simulated hosts are in the
driver's process: their answers are made beforehand, but what reads the questions counts as the driver's.
"""

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, table
from benchmarks.simulated import SimulatedHosts
from hvlaunch.agent.errand_processes import ErrandProcesses
from hvlaunch.agent.quick import Selector
from hvlaunch.driver.links.errands import HostErrands, Limits

PATIENCE = 300.0
UNLIMITED = Limits(None, None, None)
WORKER = """
import subprocess, sys, time
children = [subprocess.Popen(["sleep", "86400"]) for _ in range(int(sys.argv[1]))]
print("ready", flush=True)
sys.stdin.read()
for child in children: child.kill()
"""
PATHS = {"cwd": ".", "scratch": "/tmp", "shm": "/dev/shm"}


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Agent:
    """The agent's end of errands in this process, and the driver's end of it."""

    def __init__(self) -> None:
        self._selector = Selector()
        self._here: Any = ErrandProcesses(self, self._selector)  # type: ignore[arg-type]
        self.errands = HostErrands("here", lambda header, body: self._here.obey(dict(header), body))

    def send(self, header: dict[str, Any], body: bytes = b"", *, relayed: bool) -> None:
        """As the channel to the driver."""
        assert relayed
        self.errands.obey(header, body)

    def turn(self) -> None:
        for call, _ in self._selector.select(1.0):
            call()


def observer(workers: int, children: int, seconds: int) -> list[str]:
    """One host's, asked once a second."""
    with ExitStack() as stack:
        jobs = []
        for _ in range(workers):
            command = [sys.executable, "-c", WORKER, str(children)]
            job = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert job.stdout is not None
            job.stdout.readline()
            jobs.append(job)
        asked = [[rank, job.pid] for rank, job in enumerate(jobs)]
        agent = Agent()
        answers: list[bytes] = []
        before = set(psutil.Process().children())
        errand = agent.errands.start("observer", {}, UNLIMITED, on_data=answers.append)

        def ask(number: int) -> int:
            question = {"id": number, "kind": "samples", "size": 0, "workers": asked, "paths": PATHS}
            answers.clear()
            errand.write(json.dumps(question).encode() + b"\n")
            while not (answers and answers[-1].endswith(b"\n")):
                agent.turn()
            return sum(map(len, answers))

        ask(1)
        [process] = set(psutil.Process().children()) - before
        start, began = cpu_of(process), time.monotonic()
        size = 0
        for number in range(2, seconds + 2):
            time.sleep(max(0.0, began + number - 1 - time.monotonic()))
            size = ask(number)
        used = cpu_of(process) - start
        elapsed = time.monotonic() - began
        processes = sum(1 for _ in Path("/proc").glob("[0-9]*"))
        errand.stop()
        while not errand.has_ended:
            agent.turn()
    return [
        f"{workers} x {1 + children}",
        str(processes),
        f"{start * 1000:.0f}",
        f"{used / seconds * 1000:.2f}",
        f"{used / elapsed:.2%}",
        str(size),
    ]


def driver(hosts: int, slots: int, seconds: int) -> list[list[str]]:
    """The driver's CPU while nobody looks, and while somebody does."""
    world = SimulatedHosts(hosts, slots)
    codes: SimpleQueue[int] = SimpleQueue()
    threading.Thread(target=lambda: codes.put(world.run().exit_code)).start()
    world.wait_until_started(PATIENCE)
    process = psutil.Process()
    rows = []

    def measure(what: str) -> None:
        start, began = cpu_of(process), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        rows.append(
            [what, f"{elapsed:.0f}", f"{(cpu_of(process) - start) / elapsed:.1%}", str(world.questions)]
        )

    measure("nobody looks")
    end = world.driver.observing.observation.subscribe()
    measure("samples at 1 Hz")
    fresh = len(world.driver.observing.observation.newest())
    end()
    time.sleep(2)
    measure("nobody looks any more")
    rows.append([f"hosts with a sample: {fresh}", "", "", ""])
    world.let_workers_end()
    codes.get()
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--children", type=int, default=4, help="of each worker")
    parser.add_argument("--hosts", type=int, default=1000)
    options: Any = parser.parse_args()
    print(heading("A host's observer, asked once a second"))
    names = [
        "processes of workers",
        "on the machine",
        "start, ms CPU",
        "a sample, ms CPU",
        "of a core",
        "bytes",
    ]
    print(table(names, [observer(options.workers, options.children, options.seconds)]))
    print(heading(f"The driver with {options.hosts} simulated hosts x {options.workers}"))
    rows = driver(options.hosts, options.workers, min(30, options.seconds))
    print(table(["", "seconds", "of a core", "questions so far"], rows))


if __name__ == "__main__":
    main()
