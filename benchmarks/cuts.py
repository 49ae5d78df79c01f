"""Cuts of the driver's link that heal within the lease: how many of the jobs come through, and how soon they go on.

    python benchmarks/cuts.py
    python benchmarks/cuts.py --leases 4 --times 5 --clients paramiko

On hosts made of namespaces on this machine (root, iproute2, sshd). Several jobs of each kind run side by side, each with a
worker on each of its two hosts; one cut hits them all, at another moment between their signs of life. A job comes through if no
host of it is lost, none of its workers ends, and all of them are heard again. The exit code is 1 where one does not.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, spread, table
from tests.cluster.jobs import HVLAUNCH, PROGRAMS
from tests.testhosts.hosts import TestHosts, wait_until

START = 120.0
_LATE = 0.05
"""Of the lease: a cut that a busy machine ends later than this is not counted."""
LOOP = """\
number=1
while [ ! -e {folder}/end ]; do
  {each}
  if [ -e {folder}/ask.$number ]; then echo answer $number; number=$((number+1)); fi
  sleep 0.5
done"""
LOST = ("host_lost", "round_broken", "worker_exited", "worker_killed")


def sums(folder: Path) -> list[str]:
    return [sys.executable, str(PROGRAMS / "elastic_sums.py"), str(folder)]


def loop(each: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["sh", "-c", LOOP.format(folder=folder, each=each)]


KINDS: dict[str, tuple[list[str], Callable[[Path], list[str]]]] = {
    "static, silent": ([], loop(":")),
    "static, prints": ([], loop("echo tick")),
    "elastic, prints": (["--min-np", "2"], loop("echo tick")),
    "elastic, asks": (["--min-np", "2", "-x", "STEP=0.2"], sums),
}
"""What the jobs are: options, and the command by the job's folder."""

CLIENTS = {
    "paramiko": ["--ssh-client", "paramiko"],
    "openssh": ["--ssh-client", "openssh"],
    "mpirun": ["--mpi", "--mpirun", "mpirun.openmpi"],
    "hydra": ["--mpi", "--mpirun", "mpirun.mpich"],
}
"""What connects driver and agents: hvlaunch's ssh, or the agents themselves, where a launcher has started them, in static jobs."""


@dataclass
class Result:
    """What came of the cuts for one kind of job: seconds from the heal until all workers were heard, and what was lost."""

    seconds: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)

    def row(self, *names: str) -> list[str]:
        times = len(self.seconds) + len(self.losses)
        return [*names, f"{len(self.seconds)} of {times}", spread(self.seconds) if self.seconds else ""]


class Job:
    """A job of one kind on two hosts of its own."""

    def __init__(
        self, hosts: TestHosts, folder: Path, kind: str, pair: Sequence[str], words: list[str]
    ) -> None:
        self.kind = kind
        self._hosts = hosts
        self._folder = folder
        self._pair = pair
        self._words = words
        self._asked = self._begun = 0
        self.begin()

    def begin(self) -> None:
        """Start it, at first and where it has come to its end."""
        self._begun += 1
        self._asked = 0
        self._at = self._folder / f"{self._begun}"
        (self._at / "orders").mkdir(parents=True)
        options, command = KINDS[self.kind]
        words = ["-H", ",".join(f"{name}:1" for name in self._pair), "--events", str(self._at / "events")]
        said = (self._at / "output").open("wb")
        self._process = self._hosts.driver.popen(
            [*HVLAUNCH, *words, *self._words, *options, *command(self._at)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )

    def ask(self) -> None:
        """Have its workers say something, from now on."""
        self._asked += 1
        (self._at / f"ask.{self._asked}").touch()
        self._commits = self.said().count("commit at step")

    def is_heard(self) -> bool:
        """Whether all workers have said something since they were asked."""
        output = self.said()
        if self.kind == "elastic, asks":
            return output.count("commit at step") > self._commits
        return output.count(f"answer {self._asked}\n") == len(self._pair)

    def loss(self) -> str:
        """What was lost since its beginning, if anything was."""
        if self._process.poll() is not None:
            return f"ended with {self._process.returncode}: {self.said()[-300:]}"
        told = self._at / "events"
        events = map(json.loads, told.read_text().splitlines() if told.exists() else ())
        return next((json.dumps(event) for event in events if event["type"] in LOST), "")

    def end(self) -> None:
        """Let it end, or end it."""
        (self._at / "end").touch()
        try:
            self._process.wait(5.0 if not self.loss() else 0.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(60.0)

    def said(self) -> str:
        return (self._at / "output").read_text(errors="replace")


def cut(
    hosts: TestHosts, jobs: Sequence[Job], seconds: float, patience: float
) -> tuple[float, dict[Job, float | str]]:
    """Cut the driver's link for so long. How long it was in truth; for each job, the seconds from the heal until it is heard, or what is lost."""
    for job in jobs:
        job.ask()
    try:
        wait_until(lambda: all(job.is_heard() for job in jobs), "all jobs run", START)
    except TimeoutError as late:
        silent = next(job for job in jobs if not job.is_heard())
        raise TimeoutError(f"{silent.kind}: {silent.said()}") from late
    time.sleep(random.uniform(0.0, 2.0))
    hosts.driver.cut()
    begun = time.monotonic()
    time.sleep(seconds)
    hosts.driver.heal()
    healed = time.monotonic()
    for job in jobs:
        job.ask()
    heard: dict[Job, float | str] = {}
    while len(heard) < len(jobs):
        is_late = time.monotonic() > healed + patience
        for job in jobs:
            if job not in heard and (job.is_heard() or is_late or job.loss()):
                heard[job] = job.loss() or ("it stands still" if is_late else time.monotonic() - healed)
        time.sleep(0.05)
    time.sleep(
        max(0.0, healed + seconds - time.monotonic())
    )  # until all leases would be over that did not begin anew
    return healed - begun, {job: job.loss() or outcome for job, outcome in heard.items()}


def measure(
    hosts: TestHosts, folder: Path, lease: float, client: str, options: "Options"
) -> dict[str, Result]:
    """One lease with one client of ssh; by kind of job."""
    words = ["--lease", f"{lease:g}", *CLIENTS[client]]
    kinds = [kind for kind in options.kinds if "--mpi" not in words or kind.startswith("static")]
    pairs = [hosts.names[at : at + 2] for at in range(0, 2 * len(kinds) * options.at_once, 2)]
    jobs = [
        Job(
            hosts,
            folder / f"{client}.{lease:g}.{number}",
            kinds[number % len(kinds)],
            pair,
            words,
        )
        for number, pair in enumerate(pairs)
    ]
    results = {kind: Result() for kind in kinds}
    while min(len(one.seconds) + len(one.losses) for one in results.values()) < options.times:
        length, outcomes = cut(hosts, jobs, options.share * lease, 2.0 * lease + 10.0)
        for job, outcome in outcomes.items():
            is_counted = length < (options.share + _LATE) * lease
            if isinstance(outcome, float):
                results[job.kind].seconds += [outcome] * is_counted
            else:
                results[job.kind].losses += [outcome] * is_counted
                job.end()
                job.begin()
    for job in jobs:
        job.end()
    return results


@dataclass
class Options:
    """What the command line says."""

    times: int
    share: float
    kinds: list[str]
    at_once: int


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--leases", type=float, nargs="+", default=[4.0, 8.0, 30.0], help="seconds")
    parser.add_argument(
        "--times", type=int, default=20, help="cuts for each kind of job, at least (default 20)"
    )
    parser.add_argument(
        "--share", type=float, default=0.9, help="of the lease: how long the link is cut (default 0.9)"
    )
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=["paramiko", "openssh"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--at-once", type=int, default=3, help="jobs of each kind, side by side (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    need_hosts()
    random.seed(given.seed)
    options = Options(given.times, given.share, given.kinds, given.at_once)
    rows, losses = [], []
    with tempfile.TemporaryDirectory(prefix="hvlaunch-cuts-") as folder:
        for client in given.clients:
            for lease in given.leases:
                with TestHosts(2 * given.at_once * len(given.kinds), share=[folder]) as hosts:
                    results = measure(hosts, Path(folder), lease, client, options)
                for kind, result in results.items():
                    rows.append(result.row(client, f"{lease:g} s", kind))
                    losses += result.losses
                    print(*rows[-1], *result.losses[:1], sep="  ", file=sys.stderr, flush=True)
    print(heading(f"The driver's link is cut for {given.share:g} of the lease, and heals"))
    print(table(["client", "lease", "job", "came through", "heard again after, s"], rows))
    return bool(losses)


if __name__ == "__main__":
    sys.exit(main())
