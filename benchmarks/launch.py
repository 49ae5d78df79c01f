"""How long it takes to start a program on many hosts, wait for it and be done, next to others who do that.

    python benchmarks/launch.py --runs 5
    python benchmarks/launch.py --mpi          # `hvlaunch --mpi` beside each mpirun
    python benchmarks/launch.py --profile      # where hvlaunch's own time goes

`true` with 2 slots per host, on hosts made of namespaces on this machine (root, iproute2, sshd), and on
localhost. All of a table are run in turns. Hosts share this machine's processors, so that with many of
them it is CPU that is compared: hosts of one's own are quicker, for all alike.
"""

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import Contender, Failed, heading, in_turns, run, spread, table
from tests.testhosts.hosts import TestHosts

SLOTS = 2
HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
# Where MPICH is installed as well, `mpirun` alone may be either.
OPEN_MPI = "mpirun.openmpi" if shutil.which("mpirun.openmpi") else "mpirun"
MPIRUN = [OPEN_MPI, "--allow-run-as-root", "--mca", "plm_rsh_agent", "ssh"]
BY_MPI = [*HVLAUNCH, "--mpi", "--mpirun", OPEN_MPI] if shutil.which(OPEN_MPI) else [OPEN_MPI]
QUICK_SSH = ["--mca", "plm_rsh_args", "-o KexAlgorithms=curve25519-sha256"]
PACKAGE = Path(__file__).resolve().parents[1] / "hvlaunch"
TIMELINE = str(Path(__file__).with_name("timeline.py"))

Popen = Callable[..., subprocess.Popen[Any]]


def contender(name: str, popen: Popen, argv: Sequence[str], package: str) -> Contender:
    """One that needs the program argv[0]; `package` is how to get it."""
    if shutil.which(argv[0]) is None:
        return Contender(name, absent=f"not installed; try: {package}")
    return Contender(name, partial(run, popen, argv))


def on_hosts(hosts: TestHosts, count: int) -> list[Contender]:
    names = hosts.names[:count]
    placed = ",".join(f"{name}:{SLOTS}" for name in names)
    both = ["-np", str(SLOTS * count), "-H", placed]
    popen = hosts.driver.popen
    debian = "apt-get install openmpi-bin"
    pdsh = ["pdsh", "-R", "ssh", "-f", str(count), "-w", ",".join(names), "true & true & wait"]
    return [
        contender("hvlaunch", popen, [*HVLAUNCH, *both, "true"], ""),
        contender("hvlaunch --mpi", popen, [*BY_MPI, *both, "true"], debian),
        contender("mpirun (Open MPI)", popen, [*MPIRUN, *both, "true"], debian),
        contender("mpirun, ssh with curve25519", popen, [*MPIRUN, *QUICK_SSH, *both, "true"], debian),
        contender("pdsh", popen, pdsh, "apt-get install pdsh"),
        contender("ssh, one host", popen, ["ssh", names[0], "true"], "apt-get install openssh-client"),
    ]


def by_mpi(hosts: TestHosts, count: int, mpirun: str) -> list[Contender]:
    """hvlaunch with this mpirun, and that alone."""
    names = hosts.names[:count]
    where = ["-H", ",".join(f"{name}:{SLOTS}" for name in names)]
    alone = [*MPIRUN, *where]
    if mpirun != OPEN_MPI:
        alone = [mpirun, "-launcher", "ssh", "-hosts", where[1]]
    np = ["-np", str(SLOTS * count), "true"]
    popen = hosts.driver.popen
    package = "apt-get install openmpi-bin mpich"
    ours = [*HVLAUNCH, "--mpi", "--mpirun", mpirun, *where, *np] if shutil.which(mpirun) else [mpirun]
    return [
        contender(f"hvlaunch --mpi --mpirun {mpirun}", popen, ours, package),
        contender(mpirun, popen, [*alone, *np], package),
    ]


def on_localhost() -> list[Contender]:
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent)) or "torchrun"
    words = ["--standalone", "--nproc-per-node", str(SLOTS), "--no-python", "true"]
    here = [*HVLAUNCH, "-np", str(SLOTS), "-H", f"localhost:{SLOTS}", "true"]
    return [
        contender("hvlaunch", subprocess.Popen, here, ""),
        contender("torchrun --standalone", subprocess.Popen, [torchrun, *words], "pip install torch"),
        contender("python -c pass", subprocess.Popen, [sys.executable, "-c", "pass"], ""),
    ]


def rows(where: str, contenders: Sequence[Contender]) -> list[list[str]]:
    """hvlaunch, the first, is compared with each."""
    if not contenders[0].samples:
        return [[where, one.name, one.absent, "", ""] for one in contenders]
    ours = contenders[0].median("wall")
    found = []
    for one in contenders:
        if not one.samples:
            found.append([where, one.name, one.absent, "", ""])
            continue
        wall, cpu = ([getattr(sample, what) for sample in one.samples] for what in ("wall", "cpu"))
        ratio = f"{ours / one.median('wall'):.2f}"
        found.append([where, one.name, spread(wall), spread(cpu), ratio])
    return found


def profile(hosts: TestHosts, counts: Sequence[int], runs: int) -> str:
    """Medians of the moments that timeline.py tells."""
    columns = {}
    for count in counts:
        placed = ",".join(f"{name}:{SLOTS}" for name in hosts.names[:count])
        turns = [timeline(hosts.driver.popen, ["-H", placed, "true"]) for _ in range(runs + 1)][1:]
        columns[count] = {what: [turn[what] for turn in turns] for what in turns[0]}
    steps = list(next(iter(columns.values())))
    body = [[step, *(_moment(column[step]) for column in columns.values())] for step in steps]
    return table(["ms since the start (CPU of it); on hosts:", *map(str, columns)], body)


def _moment(turns: Sequence[tuple[float, float]]) -> str:
    wall, cpu = (statistics.median(values) for values in zip(*turns, strict=True))
    return f"{1000 * wall:.0f} ({1000 * cpu:.0f})"


def timeline(popen: Popen, words: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Seconds from the start of the process until each moment, and its CPU until then."""
    started = time.monotonic()
    process = popen(
        [sys.executable, TIMELINE, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    ended = time.monotonic() - started, usage.ru_utime + usage.ru_stime
    if process.returncode != 0:
        raise Failed(f"timeline.py {' '.join(words)} ended with {process.returncode}")
    found = {}
    for line in told.splitlines():
        what, at, cpu = line.rsplit(" ", 2)
        found[what] = (float(at) - started, float(cpu))
    return {**found, "the process has ended, its children counted": ended}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="turns that count (default 5)")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8, 32], help="numbers of hosts (1 8 32)")
    parser.add_argument(
        "--mpi", action="store_true", help="measure --mpi instead, with Open MPI and MPICH, beside mpirun"
    )
    parser.add_argument("--profile", action="store_true", help="tell where hvlaunch's own time goes instead")
    options = parser.parse_args()
    need_hosts()
    compileall.compile_dir(PACKAGE, quiet=1)  # as an installation does
    with TestHosts(max(options.hosts)) as hosts:
        if options.profile:
            print(
                heading("Where hvlaunch's time goes (medians)"),
                profile(hosts, options.hosts, options.runs),
                sep="\n",
            )
            return 0
        print(heading(f"`true`, {SLOTS} per host; median (least-most) of {options.runs} runs"))
        found = []
        for count in options.hosts:
            for contenders in (
                [by_mpi(hosts, count, mpirun) for mpirun in (OPEN_MPI, "mpirun.mpich")]
                if options.mpi
                else [on_hosts(hosts, count)]
            ):
                in_turns(contenders, options.runs)
                found += rows(str(count), contenders)
    if not options.mpi:
        contenders = on_localhost()
        in_turns(contenders, options.runs)
        found += rows("localhost", contenders)
    print(table(["hosts", "program", "wall s", "its CPU s", "hvlaunch's wall / its"], found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
