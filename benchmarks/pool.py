"""How much sooner a job starts on a warm pool: `true`, 2 on each host, next to a job without one, mpirun and PRRTE's prun.

    python benchmarks/pool.py --hosts 32 --runs 5

"first" makes the pool and runs a job on it; "second" is each job after that. prun runs on a DVM that is up, where PRRTE is
installed. Hosts are namespaces on this machine, and share its processors: with many of them it is CPU that is compared, which is
that of all processes of driver and hosts together (cpuacct), where this machine counts it so.
"""

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.launch import HVLAUNCH, MPIRUN, PACKAGE, QUICK_SSH, SLOTS
from benchmarks.measure import heading, run, spread, table
from tests.testhosts.hosts import TestHosts

_CPUACCT = Path("/sys/fs/cgroup/cpuacct")
_NAME = "bench"


class Took(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


@contextmanager
def own_group() -> Iterator[Callable[[], float]]:
    """Seconds of processor time that this process and all that it starts have used; 0 where nobody counts."""
    group = _CPUACCT / f"hvlaunch-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "tasks").write_text(str(os.getpid()))
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int((group / "cpuacct.usage").read_text()) / 1e9
    finally:
        (_CPUACCT / "tasks").write_text(str(os.getpid()))
        deadline = time.monotonic() + 10.0
        while group.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # the last of the hosts' processes end
                group.rmdir()
            time.sleep(0.05)


class Bench:
    """Runs command lines in the driver place of `hosts`."""

    def __init__(self, hosts: TestHosts, cpu: Callable[[], float], state: str) -> None:
        self._hosts = hosts
        self._cpu = cpu
        self._env = {**hosts.driver.env, "XDG_STATE_HOME": state}
        self.hosts = ["-H", ",".join(f"{name}:{SLOTS}" for name in hosts.names)]
        self.np = ["-np", str(SLOTS * len(hosts.names))]

    def take(self, *lines: Sequence[str]) -> Took:
        """All of these lines, one after the other. What they leave to be done is waited for, and counts as theirs."""
        before, wall = self._cpu(), 0.0
        for line in lines:
            wall += run(self._hosts.driver.popen, line, env=self._env).wall
        time.sleep(0.5)
        return Took(wall, self._cpu() - before)

    def up(self) -> list[str]:
        return [*HVLAUNCH, "pool", "up", _NAME, *self.hosts]

    def down(self) -> list[str]:
        return [*HVLAUNCH, "pool", "down", _NAME, "--kill"]

    def on_pool(self) -> list[str]:
        return [*HVLAUNCH, "--pool", _NAME, *self.np, "true"]


def measure(bench: Bench, runs: int) -> dict[str, list[Took]]:
    """In turns; a first turn warms up and is dropped. The first name is the one that the others are compared with."""
    found: dict[str, list[Took]] = {}
    others = {"hvlaunch, without a pool": [*HVLAUNCH, *bench.hosts, *bench.np, "true"]}
    if shutil.which(MPIRUN[0]) is not None:
        others["mpirun (Open MPI)"] = [*MPIRUN, *bench.hosts, *bench.np, "true"]
        others["mpirun, ssh with curve25519"] = [*MPIRUN, *QUICK_SSH, *bench.hosts, *bench.np, "true"]
    if shutil.which("prun") is not None:
        others["prun, the DVM is up"] = ["prun", *bench.np, "true"]
    for turn in range(runs + 1):
        took: dict[str, list[Took]] = {
            "hvlaunch, second on a pool": [],
            "hvlaunch, first: the pool, and a job": [],
            **{name: [] for name in others},
        }
        took["hvlaunch, first: the pool, and a job"].append(bench.take(bench.up(), bench.on_pool()))
        for _ in range(3):
            took["hvlaunch, second on a pool"].append(bench.take(bench.on_pool()))
        bench.take(bench.down())
        for name, line in others.items():
            took[name].append(bench.take(line))
        if turn:
            for name, values in took.items():
                found.setdefault(name, []).extend(values)
    return found


@contextmanager
def dvm(bench: Bench, hosts: TestHosts) -> Iterator[None]:
    """PRRTE's, where it is installed."""
    if shutil.which("prte") is None:
        yield
        return
    words = ["prte", "--allow-run-as-root", "--prtemca", "plm_ssh_agent", "ssh", *bench.hosts]
    process = hosts.driver.popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="turns that count (default 5)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 32], help="numbers of hosts (8 32)")
    options = parser.parse_args()
    need_hosts()
    compileall.compile_dir(PACKAGE, quiet=1)  # as an installation does
    rows = []
    print(heading(f"`true`, {SLOTS} per host; median (least-most) of {options.runs} runs"))
    for count in options.hosts:
        with own_group() as cpu, TestHosts(count) as hosts, tempfile.TemporaryDirectory() as state:
            bench = Bench(hosts, cpu, state)
            with dvm(bench, hosts):
                found = measure(bench, options.runs)
        second = next(iter(found.values()))
        for name, values in found.items():
            walls, cpus = [took.wall for took in values], [took.cpu for took in values]
            ratios = [
                f"{median(getattr(took, what) for took in second) / median(all_of):.2f}"
                if median(all_of)
                else ""
                for what, all_of in (("wall", walls), ("cpu", cpus))
            ]
            rows.append([str(count), name, spread(walls), spread(cpus), *ratios])
    print(table(["hosts", "program", "wall s", "CPU of all s", "second / its: wall", "CPU"], rows))
    if shutil.which("prun") is None:
        print("\nprun is not installed (PRRTE)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
