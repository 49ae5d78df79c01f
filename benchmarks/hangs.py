"""Whether hvlaunch names the rank and the line where a job hangs. docs/guides/hangs.md is about hangs.

    python benchmarks/hangs.py
    python benchmarks/hangs.py --timeout 60 --at-once 4 --only asleep stopped

On test hosts (tests/testhosts/hosts.py), 4 with 2 workers each; each of the jobs that run at once has its own. A job is right if hvlaunch names the culprit and its line
within --hang-timeout and 5 s of the last line that was printed, and ends with exit code 76.
"""

import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser
from benchmarks.measure import heading, table
from hvlaunch.errors import EXIT_HUNG
from hvlaunch.hosts.parse import ranges_of
from tests.testhosts.hosts import TestHosts

HERE = Path(__file__).resolve().parent
WORKER, MPI_WORKER = HERE / "hanging_worker.py", HERE / "hanging_mpi_worker.py"
KINDS = (*re.findall(r'^    "([\w-]+)": ', WORKER.read_text(), re.MULTILINE), "mpi-barrier")
CULPRIT = 5
LATE = 5.0
"""Seconds after --hang-timeout."""
LIMIT = 120.0
"""Seconds for a job, and its --hang-timeout."""


def line_of(kind: str) -> int:
    lines = (MPI_WORKER if kind == "mpi-barrier" else WORKER).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# HERE: {kind}"))


def command(kind: str, timeout: float, folder: str, hosts: TestHosts) -> list[str]:
    worker = MPI_WORKER if kind == "mpi-barrier" else WORKER
    flags = ["--mpi", "--mpi-args=--allow-run-as-root"] if kind == "mpi-barrier" else []
    names = ",".join(f"{host.name}:2" for host in hosts)
    job = [sys.executable, str(worker), kind, str(CULPRIT), folder]
    on_hang = ["--hang-timeout", str(timeout), "--on-hang", "stop", "--grace", "2"]
    return [sys.executable, "-m", "hvlaunch", *flags, "-np", "8", "-H", names, *on_hang, *job]


def cut(hosts: TestHosts) -> None:
    """What the culprit's host sends to the host before it is lost; the driver still reaches both."""
    culprit, before = hosts["c"], hosts["b"]
    for tool, address in (("iptables", before.address), ("ip6tables", before.address6)):
        culprit.run([tool, "-w", "-A", "OUTPUT", "-d", address, "-j", "DROP"], check=True)


def ranks_in(said: str) -> set[int]:
    found = re.findall(r"ranks? ([\d,-]+)", said)
    return {rank for one in found for part in ranges_of(one) for rank in part}


def play(kind: str, timeout: float) -> list[str]:
    """One job: its row of the table."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder, TestHosts(4, share=[folder]) as hosts:
        row = played(kind, timeout, hosts, folder)
    print(*row, sep=" | ", file=sys.stderr, flush=True)
    return row


def played(kind: str, timeout: float, hosts: TestHosts, folder: str) -> list[str]:
    argv = command(kind, timeout, folder, hosts)
    job = hosts.driver.popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    printed = said_at = 0.0
    said = ""
    assert job.stdout is not None
    for line in job.stdout:
        if "step" in line:
            printed = time.monotonic()
            if kind == "half-open" and "step 4" in line:
                cut(hosts)
        elif "the job hangs" in line:
            said_at = said_at or time.monotonic()
            said = line.strip()
    code = job.wait(LIMIT)
    named = CULPRIT in ranks_in(said.partition("wait for")[0])
    has_line = f":{line_of(kind)})" in said
    seconds = said_at - printed
    is_right = named and has_line and code == EXIT_HUNG and seconds <= timeout + LATE
    words = said.partition(" s; ")[2].replace("|", "/") or "nothing"
    return [kind, "yes" if is_right else "NO", f"{seconds:.1f} s" if said else "-", str(code), words]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="--hang-timeout")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--at-once", type=int, default=1, metavar="JOBS")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(partial(play, timeout=args.timeout), args.only))
    print(heading("Jobs that hang"))
    print(table(["kind", "right", "said after", "code", "what was said"], rows))
    right = sum(row[1] == "yes" for row in rows)
    print(f"\n{right} of {len(rows)} named by rank and line")
    return 0 if right >= len(rows) - 1 else 1


if __name__ == "__main__":
    sys.exit(main())
