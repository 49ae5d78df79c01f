"""Random schedules of jobs with leases on eight hosts: is a GPU ever two jobs' at once, is a lease left, does a job starve?

    python benchmarks/lease_schedules.py --minutes 20
    python benchmarks/lease_schedules.py --schedules 30 --seed 7

Four users start jobs on eight hosts (namespaces on this machine: root, iproute2, sshd) with four simulated GPUs each. Drivers and agents
are killed, links are cut, and hosts lose their power. The jobs are real ones over ssh, with a shell's workers: each locks a file for its
GPU, so that two workers with one GPU show themselves. Schedules with lease directories of their own run side by side on the same hosts.
One process forks itself for each driver, so that imports are paid for once.
"""

import fcntl
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import argument_parser, need_hosts
from benchmarks.measure import heading, table
from tests.cluster.gpus import add_gpus
from tests.testhosts.hosts import TestHosts, wait_until

HOSTS = [f"h{number}" for number in range(8)]
USERS = ["ann", "bob", "cat", "dan"]
LANES = 3
"""Schedules side by side."""
LATEST_END = 150.0
LATEST_FREE = 30.0
CLAIM = 3.0
"""Seconds from the end of the fair wait to a claim that every job knows of, on a busy machine."""
LEASE = 3
ACTS = {"driver": 12, "agent": 12, "link": 7, "power": 3, "": 66}
"""Faults after each job's start, with their weights."""
WORKER = r"""
umask 0; log=$1/log; job=$2; gpu=$CUDA_VISIBLE_DEVICES; exec 9>>"$1/$gpu.lock"
note() { echo "$1 $job $gpu $(date +%s.%N)" >>"$log"; }
flock -n 9 || note held
note start; sleep "$3"; note end
"""


class Forker:
    """A process in the driver's place which starts hvlaunch by forking itself. For any thread."""

    def __init__(self, hosts: TestHosts) -> None:
        self._process = hosts.driver.popen(
            [sys.executable, __file__, "--fork"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders: IO[bytes] = self._process.stdin
        self._lines: IO[bytes] = self._process.stdout
        self._changed = threading.Condition()
        self._pids: dict[str, int] = {}
        self._codes: dict[str, tuple[int, float]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, name: str, words: Sequence[object], output: Path) -> int:
        """Start hvlaunch; return the process id."""
        line = json.dumps({"name": name, "words": [*map(str, words)], "output": str(output)})
        with self._changed:
            self._orders.write(f"{line}\n".encode())
            self._orders.flush()
            assert self._changed.wait_for(lambda: name in self._pids, LATEST_END)
            return self._pids[name]

    def end(self, name: str) -> tuple[int, float] | None:
        """Return the exit code of a driver that has ended, and when."""
        with self._changed:
            return self._codes.get(name)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._lines:
            words = json.loads(line)
            with self._changed:
                if "pid" in words:
                    self._pids[words["name"]] = words["pid"]
                else:
                    self._codes[words["name"]] = words["code"], time.time()
                self._changed.notify_all()


def fork_for_ever() -> None:
    """Start a driver for each line of stdin. Stdout gets process ids and exit codes."""
    for name in ("cli.main", "gloo.controller", "gloo.leasing", "gloo.preparation", "driver.loop"):
        import_module(f"hvlaunch.{name}")
    running: dict[int, str] = {}
    data = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            more = os.read(0, 1 << 16)
            if not more:
                return
            *lines, data = (data + more).split(b"\n")
            for words in map(json.loads, lines):
                pid = os.fork()
                if not pid:
                    be_driver(words)
                running[pid] = words["name"]
                print(json.dumps({"name": words["name"], "pid": pid}), flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"name": running.pop(pid), "code": code}), flush=True)


def be_driver(words: Mapping[str, Any]) -> None:
    code = 70
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(words["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, descriptor in enumerate((null, output, output)):
            os.dup2(descriptor, number)
        main: Callable[[Sequence[str]], int] = import_module("hvlaunch.cli.main").main

        code = main(words["words"])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


@dataclass
class LeaseJob:
    """A job of a schedule, and what is seen of it."""

    name: str
    hosts: list[str]
    np: int
    output: Path
    pid: int = 0
    began: float = 0.0
    waits: float | None = None
    """When it was seen to wait."""
    is_killed: bool = False
    code: int | None = None
    ended: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)
    """Begin of each worker, by its GPU."""
    ends: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return min(self.starts.values(), default=float("inf"))

    @property
    def is_whole(self) -> bool:
        """True if all of its workers have run to their ends."""
        return len(self.ends) == self.np

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


class Site:
    """The hosts, with the faults that were made."""

    def __init__(self, hosts: TestHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.forker = Forker(hosts)
        self.faults: list[tuple[str, float, float]] = []
        """Hosts with the begin and the end of each fault."""
        self.counts: Counter[str] = Counter()
        self._locks = {name: threading.Lock() for name in HOSTS}
        self._keeper = threading.Lock()

    @contextmanager
    def fault(self, kind: str, host: str) -> Iterator[None]:
        with self._locks[host]:
            began = time.time()
            index = len(self.faults)
            self.faults.append((host, began, float("inf")))
            self.counts[kind] += 1
            yield
            self.faults[index] = host, began, time.time()

    def cut(self, host: str, seconds: float) -> None:
        with self.fault("cuts", host):
            with self._keeper:
                self.hosts[host].cut()
            time.sleep(seconds)
            with self._keeper:
                self.hosts[host].heal()

    def kill_agent(self, host: str) -> None:
        with self.fault("agents killed", host):
            pids = [p.pid for p in self.hosts[host].user_processes() if p.comm == "hvl-agent"]
            if pids:
                self.hosts[host].run(["kill", "-9", str(max(pids))])

    def power_off(self, host: str, seconds: float) -> None:
        with self.fault("power losses", host):
            with self._keeper:
                self.hosts[host].kill()
            time.sleep(seconds)
            with self._keeper:
                self.hosts[host].restore()
                add_gpus(self.hosts, [host])

    def is_hit(self, job: LeaseJob) -> bool:
        """True if a fault of a host may have ended the job."""
        # A lease of the connection is LEASE seconds: an earlier fault's end is not seen at once.
        return job.is_killed or any(
            host in job.hosts and began <= job.ended and ended + LEASE >= job.began
            for host, began, ended in [*self.faults]
        )

    def held(self, directory: str) -> list[str]:
        """Return the locks of leases and tickets that some process holds."""
        locked = []
        for host in self.hosts:
            # The host may be off just now, because of another schedule.
            with self._locks[host.name], suppress(FileNotFoundError):
                for path in Path(f"/proc/{host.pid}/root{directory}").iterdir():
                    with path.open("rb") as file:
                        try:
                            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        except OSError:
                            locked.append(f"{host.name}/{path.name}")
        return locked


class LeaseSchedule:
    """One schedule."""

    def __init__(self, site: Site, seed: int, *, has_faults: bool = True) -> None:
        self._site = site
        self._has_faults = has_faults
        self._seed = seed
        self._draw = random.Random(seed)
        self._directory = f"/tmp/leases-{seed}"
        self._witness = site.folder / str(seed)
        self._witness.mkdir()
        self._witness.chmod(0o777)
        self._fair_wait = self._draw.choice([0.5, 2.0, 600.0])
        self.jobs: list[LeaseJob] = []
        self.problems: list[str] = []
        self.delays: list[float] = []
        """Seconds from the last GPU's freeing to the start of the last worker."""
        self.waits: list[float] = []
        """Seconds from the end of the fair wait to the start."""

    def play(self) -> None:
        draw = self._draw
        most = draw.choice([2, 3, 8])
        hosts = draw.sample(HOSTS, most)
        faults: list[threading.Thread] = []
        for number in range(draw.randrange(2, 7)):
            self._submit(number, draw.sample(hosts, draw.randrange((most + 1) // 2, most + 1)))
            self._watch(draw.random() * 0.6)
            act = draw.choices([*ACTS], [*ACTS.values()])[0] if self._has_faults else ""
            host = draw.choice(hosts)
            if act == "driver":
                self._kill_driver(draw.choice(self.jobs))
            elif act == "agent":
                self._site.kill_agent(host)
            elif act:
                fault = self._site.cut if act == "link" else self._site.power_off
                faults.append(threading.Thread(target=fault, args=(host, draw.random() * 2)))
            for thread in faults:
                if not thread.ident:
                    thread.start()
        deadline = time.monotonic() + LATEST_END
        while any(job.code is None for job in self.jobs) and time.monotonic() < deadline:
            self._watch(0.05)
        for thread in faults:
            thread.join()
        self._check()

    def _kill_driver(self, job: LeaseJob) -> None:
        job.is_killed = True
        self._site.counts["drivers killed"] += 1
        with suppress(ProcessLookupError):
            if self._site.forker.end(job.name) is None:
                os.kill(job.pid, signal.SIGKILL)

    def _submit(self, number: int, hosts: list[str]) -> None:
        name = f"{self._seed}-{number}"
        room = 4 * len(hosts)
        np = self._draw.choice([1, room // 2, room - 1, room])
        job = LeaseJob(name, hosts, np, self._witness / f"{number}.txt", began=time.time())
        seconds = f"{self._draw.random() * 0.8:.2f}"
        words = [
            *("--lease-gpus", "--lease-directory", self._directory, "--wait"),
            *("--fair-wait", self._fair_wait, "--lease", LEASE, "-np", np, "--gpus-per-worker", 1),
            *("--ssh-user", self._draw.choice(USERS), "-H", ",".join(hosts), "--job-name", name),
            *("sh", "-c", WORKER, "worker", self._witness, name, seconds),
        ]
        job.pid = self._site.forker.start(name, words, job.output)
        self.jobs.append(job)

    def _watch(self, seconds: float) -> None:
        """Note which jobs wait, and which have ended, for so long."""
        until = time.monotonic() + seconds
        while True:
            for job in self.jobs:
                if job.code is None:
                    if job.waits is None and "waits for" in job.text():
                        job.waits = time.time()
                    if (end := self._site.forker.end(job.name)) is not None:
                        job.code, job.ended = end
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(0.05, left))

    def _check(self) -> None:
        site = self._site
        for job in self.jobs:
            if job.code is None:
                self.problems.append(f"{job.name} has no end: {job.text()}")
                with suppress(ProcessLookupError):
                    os.kill(job.pid, signal.SIGKILL)
        with suppress(AssertionError):
            wait_until(lambda: not site.held(self._directory), "leases are free", LATEST_FREE)
        if held := site.held(self._directory):
            self.problems.append(f"left: {held}")
        self._read()
        for job in self.jobs:
            if not job.code and not job.is_whole:
                self.problems.append(f"{job.name}: {len(job.ends)} of {job.np} workers: {job.text()}")
            if job.code and not site.is_hit(job):
                self.problems.append(f"{job.name} ended with {job.code}: {job.text()}")
        for job in self.jobs:
            if job.waits is not None and job.is_whole:
                self._measure(job, job.waits)

    def _read(self) -> None:
        jobs = {job.name: job for job in self.jobs}
        log = self._witness / "log"
        for line in log.read_text().splitlines() if log.exists() else ():
            kind, name, gpu, text = line.split()
            at = float(text)
            if kind == "held":
                self.problems.append(f"{gpu} was still another job's when {name} got it")
            else:
                (jobs[name].starts if kind == "start" else jobs[name].ends)[gpu] = at

    def _measure(self, job: LeaseJob, waits: float) -> None:
        others = [other for other in self.jobs if other is not job and {*other.hosts} & {*job.hosts}]
        # Starvation: a job that has queued up later takes a GPU of the job's hosts after the job's fair wait.
        since = waits + self._fair_wait
        self.waits.append(max(0.0, job.start - since))
        for other in others:
            queued = other.began if other.waits is None else other.waits
            taken = [at for gpu, at in other.starts.items() if gpu.split("-")[1] in job.hosts]
            if queued > waits + 0.5 and any(since + CLAIM < at < job.start for at in taken):
                self.problems.append(f"{other.name} has passed {job.name} after its fair wait")
        # A job that did not run to its end gave its GPUs back at an unknown time.
        if any(self._site.is_hit(other) or not other.is_whole for other in [job, *others]):
            return
        free = self._freed(job, others)
        # An older job may have had the first claim.
        if free is None or any(other.start > free and (other.waits or waits) < waits for other in others):
            return
        self.delays.append(max(job.starts.values()) - max(free, waits))

    @staticmethod
    def _freed(job: LeaseJob, others: Sequence[LeaseJob]) -> float | None:
        """Return when the job's hosts last came to have enough free GPUs before its start."""
        changes = []
        for other in others:
            units = sum(gpu.split("-")[1] in job.hosts for gpu in other.starts)
            if other.start < job.start:
                changes += [(other.start, -units), (max(other.ends.values()), units)]
        free, at = 4 * len(job.hosts), None
        for moment, change in sorted(changes):
            if moment < job.start:
                at = moment if free < job.np <= free + change else at
                free += change
        return at


def play_all(
    site: Site, seeds: Iterator[int], is_over: Callable[[], bool], *, has_faults: bool = True
) -> list[LeaseSchedule]:
    """Play schedules in several threads until `is_over`; return them."""
    played: list[LeaseSchedule] = []
    lock = threading.Lock()

    def play() -> None:
        while True:
            with lock:
                if is_over() or (seed := next(seeds, None)) is None:
                    return
            schedule = LeaseSchedule(site, seed, has_faults=has_faults)
            try:
                schedule.play()
            except Exception as error:  # noqa: BLE001 (the others go on)
                schedule.problems.append(f"{type(error).__name__}: {error}")
            played.append(schedule)
            for problem in schedule.problems:
                print(f"schedule {seed}: {problem}", flush=True)

    threads = [threading.Thread(target=play) for _ in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return played


@contextmanager
def lease_site() -> Iterator[Site]:
    """Eight hosts with four GPUs each, for four users."""
    with (
        TestHosts(HOSTS, users=USERS) as hosts,
        tempfile.TemporaryDirectory(prefix="hvlaunch-schedules-", dir="/var/tmp") as folder,
    ):
        Path(folder).chmod(0o711)
        add_gpus(hosts)
        site = Site(hosts, Path(folder))
        try:
            yield site
        finally:
            site.forker.close()


def words_of(values: Sequence[float]) -> str:
    """Return the number, the median, the 95th percentile and the maximum."""
    if not values:
        return "-"
    ordered = sorted(values)
    late = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{len(ordered)}: median {statistics.median(ordered):.2f}, p95 {late:.2f}, max {ordered[-1]:.2f}"


def summary(site: Site, played: Sequence[LeaseSchedule]) -> list[tuple[str, str]]:
    jobs = [job for schedule in played for job in schedule.jobs]
    codes = Counter("whole" if job.is_whole else "hit by a fault" for job in jobs)
    return [
        ("schedules", str(len(played))),
        ("jobs", f"{len(jobs)}, {dict(codes)}"),
        ("faults", str(dict(site.counts))),
        ("problems", str(sum(len(schedule.problems) for schedule in played))),
        ("last GPU free to all workers' start, s", words_of([x for s in played for x in s.delays])),
        ("waits beyond the fair wait, s", words_of([x for s in played for x in s.waits])),
    ]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--schedules", type=int, help="so many, whatever the time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-faults", action="store_true", help="for the times of starts alone")
    parser.add_argument("--fork", action="store_true", help="be the process of the drivers")
    options = parser.parse_args()
    if options.fork:
        fork_for_ever()
        return 0
    need_hosts()
    until = time.monotonic() + options.minutes * 60
    seeds: Iterator[int] = count(options.seed)
    if options.schedules is not None:
        seeds = iter(range(options.seed, options.seed + options.schedules))
    with lease_site() as site:
        played = play_all(
            site,
            seeds,
            lambda: options.schedules is None and time.monotonic() > until,
            has_faults=not options.no_faults,
        )
        print(heading("Random schedules of jobs with leases"))
        print(table(("", "seen"), summary(site, played)))
    return int(any(schedule.problems for schedule in played))


if __name__ == "__main__":
    sys.exit(main())
