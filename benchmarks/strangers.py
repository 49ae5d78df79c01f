"""Floods by strangers, while an elastic job runs: what its workers notice, and what the driver takes.

    python benchmarks/strangers.py
    python benchmarks/strangers.py --hvlaunch OLD/.venv/bin/hvlaunch --kinds pipeline drip

On hosts made of namespaces on this machine (root, iproute2, sshd): workers on two, strangers on two others, all connections from
the addresses of these. The job is driven by command line and sockets alone, so any version of hvlaunch can be flooded whose
virtual environment lies in its checkout. For each kind: how long a PUT and a GET of an honest client took before and while it was
flooded, the most memory that the driver had, whether a worker was called silent, how many steps the workers went on for,
and how long after the flood all was as before. `door` floods what agents call under --mpi (needs Open MPI).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, mebibytes, table
from tests.testhosts.hosts import Host, TestHosts, wait_until

HONEST = Path(__file__).with_name("honest_client.py")
FLOOD = Path(__file__).resolve().parents[1] / "tests" / "security" / "flood.py"
KINDS = {
    "pipeline": ("pipeline", 1000, "1,000 connections that send requests without a token and read no answer"),
    "idle": ("half-open", 1200, "1,200 connections that say nothing"),
    "half": ("half", 1200, "1,200 connections from two addresses, each with half a request"),
    "drip": ("drip", 600, "600 connections, a byte each second"),
    "tls": ("tls", 600, "600 handshakes of TLS that never end"),
    "refused": ("refused", 200, "200 connections that are refused and come again"),
}
DOOR = ("drip", 600, "600 dripping connections where agents call (--mpi)")
WORKER_TIMEOUT = 5
CALM = 3.0
SOON = 0.1
"""Seconds: a request that takes no longer is served as ever."""
FEW = 10
PATIENCE = 120.0
WAITING = """#!/bin/sh
case "$1" in --version|-V|-version) ;; *) while ! test -e "{folder}/go"; do sleep 0.05; done;; esac
exec mpirun "$@"
"""


class Served(NamedTuple):
    """A request of the honest client's, by the monotonic clock."""

    ended: float
    took: float


class Place:
    """The hosts, and the hvlaunch that is flooded; its python and its tests are beside it."""

    def __init__(self, hosts: TestHosts, hvlaunch: Path, files: str, folder: Path) -> None:
        self.hosts = hosts
        self.hvlaunch = hvlaunch
        self.folder = folder
        self._files = files
        self.python = hvlaunch.with_name("python")
        self.training = hvlaunch.parents[2] / "tests" / "cluster" / "programs" / "elastic_sums.py"

    def command(self, words: Sequence[object]) -> list[str]:
        """hvlaunch as a user's shell starts it."""
        return ["prlimit", f"--nofile={self._files}", str(self.hvlaunch), *map(str, words)]


class Job:
    """An elastic job on hosts a and b, with an honest client on a."""

    def __init__(self, place: Place) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=place.folder))
        (self.folder / "orders").mkdir()
        script = f'[ "$HVLAUNCH_RANK" = 0 ] && {place.python} {HONEST} {self.folder} & echo "$HVLAUNCH_RENDEZVOUS" > {self.folder}/url; exec {place.python} {place.training} {self.folder}'
        words: list[object] = ["-H", "a:1,b:1", "-np", "2", "--min-np", "2", "--grace", "2"]
        words += ["--worker-timeout", WORKER_TIMEOUT, "--events", self.folder / "events", "sh", "-c", script]
        self._output = (self.folder / "output").open("wb")
        self.process = place.hosts.driver.popen(
            place.command(words), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )
        self.driver = psutil.Process(self.process.pid)
        self.most_memory = 0
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def _watch_memory(self) -> None:
        try:
            while True:
                self.most_memory = max(self.most_memory, self.driver.memory_info().rss)
                time.sleep(0.05)
        except psutil.Error:
            pass

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def served(self) -> list[Served]:
        path = self.folder / "served"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Served(*map(float, line.split())) for line in lines if line.count(" ") == 1]

    def steps(self) -> int:
        found = [line for line in self.output.splitlines() if "commit at step " in line]
        return int(found[-1].rpartition(" ")[2]) if found else 0

    def target(self) -> str:
        return (self.folder / "url").read_text().strip().partition("//")[2]

    def hanging(self) -> int:
        """How often a worker or a host was called silent."""
        return sum("silent" in line for line in self.output.splitlines())

    def close(self) -> None:
        (self.folder / "end").touch()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(PATIENCE)
        self._output.close()


@contextmanager
def flood(strangers: Sequence[Host], kind: str, target: str, count: int) -> Iterator[None]:
    """While in the block `count` connections, shared by the strangers, flood the target."""
    with ExitStack() as stack:
        floods = []
        for host in strangers:
            words = [
                "nice",
                "-n",
                "10",
                sys.executable,
                str(FLOOD),
                kind,
                target,
                str(count // len(strangers)),
                host.address,
            ]
            process = host.popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            floods.append(process)
        for process in floods:
            assert process.stdin is not None
            stack.callback(process.stdin.close)
        yield


def flooded(place: Place, kind: str, seconds: float) -> list[str]:
    """A row of the table."""
    how, count, words = KINDS[kind]
    job = Job(place)
    try:
        wait_until(lambda: (job.steps() > 0 and len(job.served()) > FEW) or job.has_ended, "steps", PATIENCE)
        assert not job.has_ended, job.output
        time.sleep(CALM)
        calm = job.served()
        steps, memory = job.steps(), job.most_memory
        began = time.monotonic()
        with flood([place.hosts["m"], place.hosts["n"]], how, job.target(), count):
            while time.monotonic() < began + seconds and not job.has_ended:
                time.sleep(0.1)
            went_on = job.steps() - steps
        ended = time.monotonic()
        after = _recovery(job, ended)
        during = [one.took for one in job.served() if began <= one.ended and one.ended - one.took <= ended]
        return [
            words,
            _figures([one.took for one in calm]),
            _figures(during) if during else "none was served",
            f"{mebibytes(memory)} | {mebibytes(job.most_memory)}",
            f"{job.hanging()}",
            f"{went_on / seconds:.0f}" if not job.has_ended else f"the job ended ({job.process.returncode})",
            after,
        ]
    finally:
        job.close()


def _recovery(job: Job, ended: float) -> str:
    """Seconds after the flood's end until requests were served as before."""

    def is_normal() -> bool:
        late = [one for one in job.served() if one.ended > ended]
        return job.has_ended or (len(late) > FEW and all(one.took < SOON for one in late[-FEW:]))

    try:
        wait_until(is_normal, "all is as before", PATIENCE)
    except Exception:  # noqa: BLE001 (that it takes so long is the result)
        return f"more than {PATIENCE:g}"
    slow = [one.ended for one in job.served() if one.ended > ended and one.took >= SOON]
    return "-" if job.has_ended else f"{max(slow, default=ended) - ended:.1f}"


def _figures(took: list[float]) -> str:
    if len(took) < 2:  # noqa: PLR2004 (the fewest that have quantiles)
        return f"{len(took)} in {sum(took):.1f} s"
    quantiles = statistics.quantiles(took, n=100, method="inclusive")
    return f"{quantiles[49] * 1000:.0f} / {quantiles[98] * 1000:.0f} / {max(took) * 1000:.0f}"


def door(place: Place) -> list[str]:
    """A row for `hvlaunch --mpi true`, whose launcher is held back until the flood is there."""
    how, count, words = DOOR
    calm = _mpi(place, None)
    hurt = _mpi(place, (how, count))
    return [words, calm[0], hurt[0], f"{calm[1]} | {hurt[1]}", "-", "-", "-"]


def _mpi(place: Place, attack: tuple[str, int] | None) -> tuple[str, str]:
    """Milliseconds from the launcher's start to the job's end; the driver's memory."""
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    launcher = folder / "mpirun"
    launcher.write_text(WAITING.format(folder=folder))
    launcher.chmod(0o755)
    output = (folder / "output").open("wb")
    words = ["--mpi", "--mpirun", launcher, "-H", "a:1,b:1", "-np", "2", "true"]
    process = place.hosts.driver.popen(
        place.command(words), stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    driver = psutil.Process(process.pid)
    ports = wait_until(lambda: _listening(process.pid) or None, "the door", PATIENCE)
    with ExitStack() as stack:
        for port in ports if attack is not None else ():
            target = f"{place.hosts.driver.address}:{port}"
            stack.enter_context(flood([place.hosts["m"], place.hosts["n"]], attack[0], target, attack[1]))  # type: ignore[index]
        time.sleep(CALM)
        memory = driver.memory_info().rss
        began = time.monotonic()
        (folder / "go").touch()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        took = f"{(time.monotonic() - began) * 1000:.0f}, code {process.wait()}"
    output.close()
    return took, mebibytes(memory)


def _listening(pid: int) -> list[int]:
    """The ports of all addresses where somebody in the process' network listens that is no sshd."""
    ports = set()
    tables = [path for path in (Path(f"/proc/{pid}/net/tcp"), Path(f"/proc/{pid}/net/tcp6")) if path.exists()]
    for path in tables:
        for line in path.read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, port = local.rpartition(":")
            if state == "0A" and int(port, 16) > 1024 and not address.endswith("0100007F"):  # noqa: PLR2004 (a user's)
                ports.add(int(port, 16))
    return sorted(ports)


HEAD = (
    "flood",
    "before, ms: p50 / p99 / max",
    "while, ms: p50 / p99 / max",
    "driver MiB: before, most",
    "called silent",
    "steps/s",
    "normal after s",
)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--hvlaunch", type=Path, default=Path(sys.executable).with_name("hvlaunch"))
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "door"], default=[*KINDS, "door"])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each flood")
    parser.add_argument(
        "--files",
        default="1024:",
        help="soft and hard limit of the driver's open files; without the hard one, as it is",
    )
    options = parser.parse_args()
    need_hosts()
    rows = _measure(options)
    print(heading(f"Floods, {options.seconds:g} s each, on {options.hvlaunch}"))
    print(table(HEAD, rows))
    return 0


def _measure(options: argparse.Namespace) -> list[list[str]]:
    rows = []
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
        TestHosts(["a", "b", "m", "n"]) as hosts,
    ):
        place = Place(hosts, options.hvlaunch.absolute(), options.files, Path(folder))
        for kind in options.kinds:
            rows.append(door(place) if kind == "door" else flooded(place, kind, options.seconds))
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
