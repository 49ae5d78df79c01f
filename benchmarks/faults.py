"""Random faults, one after the other and several at a time, while a job trains in the process; by seed.

    python benchmarks/faults.py --faults 200 --seed 1
    python benchmarks/faults.py --minutes 60

On hosts made of namespaces on this machine (root, iproute2, sshd), with one Gloo worker each. After every fault training must
go on; at the end it must end well, its result must be what the steps say, no round may have begun with less than one
of its workers had saved, and nothing may be left on any host. The exit code is 1 where any of that is not so; the job's events and output
are kept then.
"""

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading
from benchmarks.soak_check import Soak, Told
from tests.cluster.jobs import HVLAUNCH, agents
from tests.cluster.testhosts import Host, Process, TestHosts, wait_until

TRAINING = str(Path(__file__).with_name("soak_training.py"))
COMMIT_EVERY = 8  # as in soak_training.py, which needs torch
LEASE = 5
WORKER_TIMEOUT = 5
LEAST = 2
MOST_AWAY = 3
"""Hosts that are off, cut or out of the pool at the same time, at most."""
PATIENCE = 120.0
"""Seconds in which training must go on after a fault."""


class Job:
    """A job on all hosts, and its pool; `away` are hosts that are to be brought back, by name."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.pool = list(hosts.names)
        self._write_pool()
        self._told = Told(folder / "told")
        self._soak = Soak(COMMIT_EVERY)
        self.away: dict[str, Callable[[], None]] = {}
        words = ["--host-discovery-script", f"cat {folder}/pool", "--min-np", str(LEAST)]
        words += ["--lease", str(LEASE), "--worker-timeout", str(WORKER_TIMEOUT), "--grace", "2"]
        words += [
            "--blacklist-cooldown-range",
            "1",
            "4",
            "--discovery-interval",
            "0.5",
            "--start-timeout",
            "20",
        ]
        words += ["--reset-timeout", "20", "-x", "OMP_NUM_THREADS=1", "--events", str(folder / "events")]
        said = (folder / "output").open("wb")
        self.process = hosts.driver.popen(
            [*HVLAUNCH, *words, sys.executable, TRAINING, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )

    @property
    def soak(self) -> Soak:
        return self._soak.add(self._told)

    def goes_on(self, size: int = LEAST, steps: int = 1) -> None:
        """Wait until so many train together, and have done so many more steps."""
        before = self.soak.done

        def does() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the job has ended with {self.process.returncode}")
            return self.soak.size >= size and self.soak.done >= before + steps

        wait_until(does, f"{size} workers go on", PATIENCE)

    def leave(self, host: Host) -> bool:
        """Take the host out of the pool."""
        self.pool.remove(host.name)
        self._write_pool()
        self.away[host.name] = lambda: self._join(host)
        return True

    def _join(self, host: Host) -> None:
        self.pool.insert(random.randint(0, len(self.pool)), host.name)
        self._write_pool()

    def _write_pool(self) -> None:
        new = self.folder / "new"
        new.write_text("".join(f"{name}:1\n" for name in self.pool))
        new.replace(self.folder / "pool")


def workers(host: Host) -> list[Process]:
    return [one for one in host.user_processes() if TRAINING in one.argv]


def send(host: Host, name: str, processes: Sequence[Process]) -> bool:
    return any(host.run(["kill", f"-{name}", str(one.pid)]).returncode == 0 for one in processes)


def power_off(job: Job, host: Host) -> bool:
    host.kill()
    job.away[host.name] = host.restore
    return True


def cut(job: Job, host: Host) -> bool:
    host.cut()
    job.away[host.name] = host.heal
    return True


FAULTS: dict[str, Callable[[Job, Host], bool]] = {
    "a worker is killed": lambda _, host: send(host, "KILL", workers(host)),
    "a worker hangs": lambda _, host: send(host, "STOP", workers(host)),
    "an agent is killed": lambda _, host: send(host, "KILL", agents(host.user_processes())),
    "a host is switched off": power_off,
    "a host's link is cut": cut,
    "a host leaves the pool": lambda job, host: job.leave(host),
}
"""Each says whether there was something to do it to."""


def some_faults(job: Job) -> list[str]:
    """Do something, or two things at once, and perhaps undo something done before; then training must go on."""
    names = [one_fault(job) for _ in range(random.choice((1, 1, 2)))]
    time.sleep(random.choice((0.0, 0.0, random.uniform(0.0, 2.0), random.uniform(0.0, LEASE + 3.0))))
    away = list(job.away)
    random.shuffle(away)
    for one in away[random.randint(0, 1) :] if len(away) < MOST_AWAY else away:
        tell(f"  {one} comes back")
        job.away.pop(one)()
    job.goes_on(random.choice((LEAST, LEAST, len(job.hosts.names) - len(job.away))))
    job.goes_on(steps=random.randint(1, 2 * COMMIT_EVERY))
    return names


def one_fault(job: Job) -> str:
    """Of a random kind, on a random host that is there; its name."""
    while True:
        name = random.choice(list(FAULTS))
        host = job.hosts[random.choice([one for one in job.hosts.names if one not in job.away])]
        if FAULTS[name](job, host):
            tell(f"{name}, {host.name}")
            return name


def tell(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def end(job: Job) -> list[str]:
    """Let the job end; what is wrong with how it ended."""
    for one in list(job.away):
        job.away.pop(one)()
    (job.folder / "end").touch()
    problems = []
    code = job.process.wait(PATIENCE)
    if code != 0:
        problems.append(f"the job has ended with {code}")
    if not (job.folder / "done").exists():
        problems.append("it was not done")
    return problems + job.soak.problems()


def left(hosts: TestHosts) -> list[str]:
    """What still runs anywhere, when it had time to end."""

    def found() -> list[str]:
        return [f"{host.name}: {one}" for host in hosts for one in host.user_processes()]

    try:
        wait_until(lambda: not found(), "nothing is left", 3.0 * LEASE + 10.0)
    except TimeoutError:
        return found()
    return []


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most (default 60)")
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    need_hosts()
    random.seed(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="hvlaunch-faults-"))
    with TestHosts(options.hosts, share=[str(folder)]) as hosts:
        done: Counter[str] = Counter()
        job = Job(hosts, folder)
        until = time.monotonic() + 60.0 * options.minutes
        try:
            job.goes_on(options.hosts)
            while done.total() < options.faults and time.monotonic() < until:
                done.update(some_faults(job))
                tell(f"{done.total()} faults")
            problems = end(job)
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
            problems = [str(error), *job.soak.problems()]
            job.process.terminate()
        problems += [f"left running: {one}" for one in left(hosts)]
        report(job.soak, done, problems)
    if problems:
        print(f"kept in {folder}", flush=True)
    else:
        shutil.rmtree(folder)
    return bool(problems)


def report(soak: Soak, done: Counter[str], problems: list[str]) -> None:
    lost = soak.lost()
    print(heading(f"{done.total()} faults: {', '.join(f'{name} {count}' for name, count in done.items())}"))
    print(f"{len(soak.rounds)} rounds, {soak.step} steps, a commit after every {COMMIT_EVERY}")
    if lost:
        print(f"steps lost at a change of rounds: median {statistics.median(lost):g}, at most {max(lost)}")
    print("\n".join(f"WRONG: {problem}" for problem in problems) or "all was right", flush=True)


if __name__ == "__main__":
    sys.exit(main())
