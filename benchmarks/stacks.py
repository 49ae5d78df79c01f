"""How long `hvlaunch stacks` takes with very many hosts: from the command to its last line. docs/guides/hangs.md is about stacks.

    python benchmarks/stacks.py                  # 1,000 simulated hosts x 8 workers of 24 threads
    python benchmarks/stacks.py --times 3

The hosts are in the driver's process, and what they do there (to send what was made up) counts as the driver's. Driver,
control socket and the command itself are real.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, table
from benchmarks.simulated import SimulatedHosts
from hvlaunch.agent.errands.observer.stacks import packed

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300.0
FRAMES = 22
LATE = 7
"""The rank that the others wait for."""


@cache
def thread(number: int, line: int) -> dict[str, Any]:
    library = "/usr/lib/python3.11/site-packages/torch/distributed/c10d_logger.py"
    frames = [[f"call_{depth}", library, line] for depth in range(1, FRAMES)]
    frames.insert(0, ["main", "/home/somebody/train.py" if number == 0 else library, line])
    return {"name": f"Thread-{number}", "is_python": True, "frames": frames}


def found(ranks: tuple[int, ...], threads: int) -> str:
    """What a host says: its ranks are in one collective, but for one of all, and each has a thread of its own."""
    stacks = []
    for rank in ranks:
        own = [thread(0, 31 if rank == LATE else 88), thread(1, rank + 100)]
        common = [thread(number, 7) for number in range(2, threads)]
        process = {"rank": rank, "pid": 1, "command": "python train.py", "is_child": False}
        stacks.append({**process, "source": "py-spy", "problem": None, "threads": own + common})
    return json.dumps({**packed(stacks), "lacks": None})


def ask(job: str, driver: psutil.Process) -> list[str]:
    """One command: its row of the table."""

    def used() -> float:
        times = driver.cpu_times()
        return times.user + times.system

    command = [sys.executable, "-m", "hvlaunch", "stacks", job]
    before, cpu, began = resource.getrusage(resource.RUSAGE_CHILDREN), used(), time.monotonic()
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    took = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    client = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    is_right = f"rank {LATE}: main (train.py:31)" in said
    figures = [f"{took:.1f}", f"{used() - cpu:.1f}", f"{client:.1f}"]
    return [*figures, str(len(said.splitlines())), "yes" if is_right else "NO"]


def measure(world: SimulatedHosts, jobs: "SimpleQueue[str]", times: int, rows: list[list[str]]) -> None:
    try:
        job = jobs.get(timeout=PATIENCE)
        world.wait_until_started(PATIENCE)
        rows.extend(ask(job, psutil.Process()) for _ in range(times))
    finally:
        world.let_workers_end()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8, help="on each host")
    parser.add_argument("--threads", type=int, default=24, help="of each worker")
    parser.add_argument("--times", type=int, default=1)
    options: Any = parser.parse_args()
    rows: list[list[str]] = []
    jobs: SimpleQueue[str] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="stacks-") as state:
        os.environ["XDG_STATE_HOME"] = state
        world = SimulatedHosts(options.hosts, options.workers)
        answers = {
            ranks: found(ranks, options.threads)
            for first in range(0, options.hosts * options.workers, options.workers)
            for ranks in [tuple(range(first, first + options.workers))]
        }
        nobody = found((), 0)
        world.answer("stacks", lambda ranks: answers.get(ranks, nobody))
        asker = threading.Thread(target=measure, args=(world, jobs, options.times, rows))
        asker.start()
        code = world.run_as_job(jobs.put).exit_code
        asker.join()
    print(heading(f"The stacks of {options.hosts} simulated hosts x {options.workers}"))
    print(table(["answer after, s", "driver's CPU s", "command's CPU s", "lines", "right"], rows))
    return 0 if code == 0 and rows and all(row[-1] == "yes" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
