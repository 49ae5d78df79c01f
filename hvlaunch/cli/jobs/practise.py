"""`hvlaunch practise`: a training on pretended hosts, faults by its user, and the recoveries."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hvlaunch
from hvlaunch.cli.process import print_answer
from hvlaunch.errors import BadUsage
from hvlaunch.gloo.controller import run
from hvlaunch.gloo.pretended_hosts import PretendedHosts
from hvlaunch.job import LONG_LEASE, ElasticOptions, Host, JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import NoJobDirectory, jobs_directory
from hvlaunch.owners import reason
from hvlaunch.practise_training import END, REPORTS, SLOW, SLOW_STEP, SLOW_TIME

__all__ = [
    "FAULTS",
    "Course",
    "JobEnded",
    "Lines",
    "NotRecovered",
    "Outcome",
    "play",
    "recovery_table",
    "run_practise_command",
]

_ALL = "all"
_QUIT = ("quit", "exit", "q")
_NAMES = ("p1", "p2", "p3", "p4")
_WORKERS = 3
_EXCLUSION = 3.0
"""Exclusion of a lost host, in seconds."""
_START_LIMIT = 180.0
"""Longest start of the workers, in seconds: torch may come from a slow disk."""
_END_LIMIT = 10.0
_LOOK = 0.1
_PAUSE = 1.0
"""Seconds of undisturbed steps before and after a fault."""
_SWEEP = 'set --; while IFS= read -r path; do set -- "$@" "$path"; done; rm -rf -- "$@"'
"""A program of the shell. Its stdin ends with this process, even by SIGKILL; no handler would run then."""
_CUT = 2.0
"""Duration of a cut in seconds: shorter than --reconnect-timeout."""
_DOWN = 2.0
"""Absence of a lost host in seconds: shorter than its exclusion, so that the next connection succeeds."""
_LIMIT = 60.0
"""Longest recovery in seconds."""
_FEW = 5
"""Number of steps for a mean duration."""

Record = Mapping[str, Any]


class NotRecovered(Exception):
    """The training did not go on in time, or the fault is impossible; the text is the reason."""


class JobEnded(Exception):
    """The job has ended."""


class PlacedWorker(NamedTuple):
    """A worker of the present round."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host}"


class Outcome(NamedTuple):
    """How a fault ended."""

    fault: str
    happened: str
    """The fault in words: `rank 2 on host p3 was killed`."""
    recovery: str
    """The recovery in words."""
    seconds: float | None
    """Seconds from the fault to the recovery; None without one."""


class Lines:
    """Reads lines of a descriptor, for at most some time."""

    def __init__(self, descriptor: int) -> None:
        self.is_over = False
        """True after the last line."""
        self._descriptor = descriptor
        self._rest = b""

    def get(self, seconds: float) -> str | None:
        """Return the next line; None if none comes in time, or after the last."""
        while b"\n" not in self._rest and not self.is_over:
            if not select.select([self._descriptor], [], [], max(0.0, seconds))[0]:
                return None
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:
                data = b""
            self._rest += data
            self.is_over = not data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace") if line or not self.is_over else None


class Course:
    """The course of the job by `lines`: its events, and the steps of rank 0."""

    def __init__(self, lines: Lines, size: int) -> None:
        self._lines = lines
        self._full_size = size
        self._pids: dict[tuple[str, int], int] = {}
        """Living workers by host and slot."""
        self._ranks: dict[int, tuple[str, int]] = {}
        self._waiting: set[tuple[str, int]] = set()
        """Workers between a request for a rank and its grant."""
        self._size = 0
        self._steps: deque[float] = deque(maxlen=_FEW)
        """The durations of the newest steps of the present round."""

    def follow(self, seconds: float) -> Record | None:
        """Return the next record; None if none comes in time. Raises JobEnded."""
        line = self._lines.get(seconds)
        if line is None:
            return None
        record: Record = json.loads(line)
        seat = record.get("host", ""), record.get("slot", -1)
        match record["type"]:
            case "worker_started":
                self._pids[seat] = record["pid"]
            case "worker_asked":
                self._waiting.add(seat)
            case "worker_placed":
                # Rank 0 is placed first.
                self._ranks = {**(self._ranks if record["rank"] else {}), record["rank"]: seat}
                self._waiting.discard(seat)
            case "worker_exited":
                self._pids.pop(seat, None)
                self._waiting.discard(seat)
            case "host_lost":
                self._pids = {other: pid for other, pid in self._pids.items() if other[0] != seat[0]}
                self._waiting &= self._pids.keys()
            case "round_formed":
                self._size = record["workers"]
                self._steps.clear()
            case "step":
                self._steps.append(record["seconds"])
            case "job_ended":
                raise JobEnded
        return record

    def expect(self, *types: str) -> tuple[float, Record]:
        """Return the time and the content of the next record of these types. Raises NotRecovered, JobEnded."""
        deadline = time.monotonic() + _LIMIT
        while (record := self.follow(deadline - time.monotonic())) is not None:
            if record["type"] in types:
                return time.monotonic(), record
        raise NotRecovered(f"not within {_LIMIT:g} s")

    @property
    def workers(self) -> list[PlacedWorker]:
        """The living workers of the present round, by rank."""
        seats = sorted(self._ranks.items())
        return [PlacedWorker(rank, seat[0], self._pids[seat]) for rank, seat in seats if seat in self._pids]

    @property
    def is_whole(self) -> bool:
        """True if all workers train, and a spare waits."""
        return self._size == self._full_size and len(self._steps) == _FEW and bool(self._waiting)

    @property
    def step_seconds(self) -> float:
        """The mean duration of the newest steps."""
        return sum(self._steps) / max(1, len(self._steps))

    def end_training(self) -> bool:
        """Ask the workers to end their training; False without workers."""
        workers = self.workers
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, END)
        return bool(workers)


class Fault(NamedTuple):
    """A fault: a signal to a worker or to the agent of its host, or a cut connection."""

    help: str
    happened: str
    """The predicate behind the worker's name."""
    await_recovery: Callable[[Course, float, float], tuple[str, float]]
    """Waits for the recovery, by the time of the fault and the duration of a step before; returns a text and a time.

    Raises NotRecovered.
    """
    number: int = 0
    """The signal; 0 cuts the connection."""
    is_for_agent: bool = False
    away: float = 0.0
    """Absence of the host in seconds."""


def play(course: Course, hosts: PretendedHosts, word: str, rank: int | None = None) -> Outcome:
    """Cause a fault, wait for the recovery, and return the outcome. The default of `rank` is the last rank.

    Raises NotRecovered if no such worker trains, and JobEnded.
    """
    # Older records do not tell of this fault.
    while course.follow(0.0) is not None:
        pass
    by_rank = {worker.rank: worker for worker in course.workers}
    worker = by_rank.get(max(by_rank, default=0) if rank is None else rank)
    if worker is None:
        ranks = f"ranks are 0-{max(by_rank)}" if by_rank else "no training runs"
        raise NotRecovered(f"no worker has that rank: {ranks}")
    fault = FAULTS[word]
    before, start = course.step_seconds, time.monotonic()
    hosts.keep_away(worker.host, fault.away)
    try:
        if fault.number:
            os.kill(_parent_of(worker.pid) if fault.is_for_agent else worker.pid, fault.number)
        else:
            hosts.cut(worker.host)
    except ProcessLookupError:
        raise NotRecovered(f"{worker} has just ended") from None
    happened = f"{worker} {fault.happened}"
    try:
        recovery, end = fault.await_recovery(course, start, before)
    except NotRecovered as error:
        return Outcome(word, happened, f"the training did not recover: {error}", None)
    return Outcome(word, happened, recovery, end - start)


def _parent_of(pid: int) -> int:
    """Raises ProcessLookupError."""
    import psutil  # noqa: PLC0415 (for one fault alone)

    try:
        return int(psutil.Process(pid).ppid())
    except psutil.NoSuchProcess:
        raise ProcessLookupError from None


def _await_round(course: Course, start: float, _before: float) -> tuple[str, float]:
    formed_at, formed = course.expect("round_formed")
    end, step = course.expect("step")
    return (
        f"round {formed['round']} was formed with {formed['workers']} workers after {formed_at - start:.2f} s, "
        f"and step {step['step']} was done after {end - start:.2f} s"
    ), end


def _await_connection(course: Course, start: float, _before: float) -> tuple[str, float]:
    steps = 0
    while True:
        end, record = course.expect("step", "host_back", "host_lost")
        if record["type"] == "host_lost":
            raise NotRecovered(record["cause"])
        if record["type"] == "host_back":
            return (
                f"it trained on, {steps} steps meanwhile; there was another connection after {end - start:.2f} s, "
                "and nothing was lost"
            ), end
        steps += 1


def _await_speed(course: Course, start: float, before: float) -> tuple[str, float]:
    slow: list[float] = []
    while True:
        end, record = course.expect("step", "round_broken")
        if record["type"] == "round_broken":
            raise NotRecovered(record["cause"])
        if record["seconds"] >= SLOW_STEP:
            slow.append(record["seconds"])
        elif slow:
            return (
                f"all ranks waited for it, and a step took {sum(slow) / len(slow):.2f} s instead of {before:.2f} s; "
                f"no round ended, and the speed was back after {end - start:.1f} s"
            ), end


FAULTS: Mapping[str, Fault] = {
    "kill": Fault("a worker is killed", "was killed by SIGKILL", _await_round, signal.SIGKILL),
    "cut": Fault(
        f"the connection to a host is cut for {_CUT:g} s",
        f"was cut off from hvlaunch for {_CUT:g} s",
        _await_connection,
        away=_CUT,
    ),
    "freeze": Fault("a worker is frozen", "was frozen by SIGSTOP", _await_round, signal.SIGSTOP),
    "slow": Fault(
        f"a worker is slow for {SLOW_TIME:g} s", f"was slow for {SLOW_TIME:g} s", _await_speed, SLOW
    ),
    # The agent's guardian then kills everything of the job on its host, and cleans up.
    "host": Fault(
        "a host is lost",
        "was lost with its whole host",
        _await_round,
        signal.SIGKILL,
        is_for_agent=True,
        away=_DOWN,
    ),
}


def run_practise_command(fault: str | None) -> int:
    """Play a fault, or `all`, or with None the faults typed by the user; return the exit code. Raises HvlaunchError."""
    if fault not in (None, _ALL, *FAULTS):
        raise BadUsage(f"practise: no fault is called {fault}", hint=f"{', '.join(FAULTS)}, or {_ALL}")
    words = [] if fault is None else [*FAULTS] if fault == _ALL else [fault]
    with _swept() as sweep:
        pipe = _new_pipe(sweep)
        # Opened for both directions, so that it is open before there are writers, and has no end.
        hosts = PretendedHosts()
        session = _Session(hosts, words, os.open(pipe, os.O_RDWR))

        def sweep_job(job_id: str) -> None:
            with suppress(NoJobDirectory):
                sweep(jobs_directory(os.environ) / job_id)

        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (no path is joined)
            result = run(
                _spec(pipe),
                stdout=sys.stdout.buffer,
                stderr=sys.stderr.buffer,
                stdin=nothing.fileno(),
                ways=hosts.ways(session.begin),
                on_begun=sweep_job,
            )
    if words and session.outcomes:
        print_answer(recovery_table(session.outcomes))
    recovered = sum(outcome.seconds is not None for outcome in session.outcomes)
    return result.exit_code or int(recovered < max(len(words), len(session.outcomes)))


def recovery_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with a line for each fault."""
    rows = [("FAULT", "RECOVERED AFTER", "WHAT HAPPENED")]
    for outcome in outcomes:
        seconds = "not at all" if outcome.seconds is None else f"{outcome.seconds:.2f} s"
        rows.append((outcome.fault, seconds, outcome.happened))
    return "".join(f"{fault:<7}  {seconds:>15}  {happened}\n" for fault, seconds, happened in rows)


@contextmanager
def _swept() -> Iterator[Callable[[Path], None]]:
    """Yield a function for directories to remove at the end of the block or of this process."""
    # A session of its own: Ctrl-C must not end it before this process.
    shell = subprocess.Popen(["/bin/sh", "-c", _SWEEP], stdin=subprocess.PIPE, start_new_session=True)

    def sweep(path: Path) -> None:
        if shell.stdin is not None:
            shell.stdin.write(os.fsencode(path) + b"\n")
            shell.stdin.flush()

    try:
        yield sweep
    finally:
        shell.communicate()


def _new_pipe(sweep: Callable[[Path], None]) -> Path:
    """Make a named pipe in a directory of its own. Raises BadUsage."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="hvlaunch-practise-"))
        sweep(folder)
        os.mkfifo(folder / "events", 0o600)
    except OSError as error:
        cause = f"practise: {reason(error)}"
        raise BadUsage(cause, hint="TMPDIR=DIRECTORY") from None
    return folder / "events"


def _spec(pipe: Path) -> JobSpec:
    # The workers find this hvlaunch wherever it is.
    root = str(Path(hvlaunch.__file__).parents[1])
    return JobSpec(
        command=(sys.executable, "-m", "hvlaunch.practise_training"),
        # With this address a host is this machine: driver, agents and workers take the ways of a local job.
        hosts=tuple(Host(name, slots=1, address="localhost") for name in _NAMES),
        cwd="/",
        name="practise",
        elastic=ElasticOptions(min_np=1, max_np=_WORKERS, spares=1, cooldown=(_EXCLUSION, _EXCLUSION)),
        np=_WORKERS,
        stdin="none",
        lease=LONG_LEASE,
        # A frozen worker is killed then, if hvlaunch itself is killed.
        grace=2.0,
        events=pipe,
        # Nobody else can connect to the workers, and a machine without a network will do.
        network_interfaces=("lo", "lo0"),
        env={
            REPORTS: str(pipe),
            # torch makes a directory there.
            "TMPDIR": str(pipe.parent),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            # Pretended hosts would share the GPUs, which NCCL refuses.
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        },
    )


class _Session:
    """Plays faults on a job, and ends its training."""

    def __init__(self, hosts: PretendedHosts, words: Sequence[str], pipe: int) -> None:
        self.outcomes: list[Outcome] = []
        self._words = words
        self._hosts = hosts
        self._course = Course(Lines(pipe), _WORKERS)

    def begin(self, say: Callable[[str], None]) -> None:
        """Play in a thread, with messages by `say`."""
        threading.Thread(target=self._play, args=(say,), name="practise", daemon=True).start()

    def _play(self, say: Callable[[str], None]) -> None:
        way = (
            "by torch's DistributedDataParallel"
            if find_spec("torch")
            else "as a toy, since torch is not installed"
        )
        say(f"{', '.join(_NAMES)} are pretended hosts on this machine")
        say(f"{_WORKERS} workers will train, {way}; another one waits as a spare")
        try:
            self._await_whole()
            for word in self._words:
                self._await_whole()
                self._follow(_PAUSE)
                self._play_one(word, None, say)
                self._follow(_PAUSE)
            if not self._words:
                self._play_typed(say)
            self._end()
        except JobEnded:
            return
        except NotRecovered as error:
            say(f"practise: {error}")
            # The training may be stuck, and take no order.
            os.kill(os.getpid(), signal.SIGTERM)

    def _play_typed(self, say: Callable[[str], None]) -> None:
        faults = "\n".join(f"  {word:<8}{fault.help}" for word, fault in FAULTS.items())
        usage = f"type a fault and press Enter; a rank may follow, as in: kill 0\n{faults}\n  quit    the training ends"
        say(usage)
        typed = Lines(0)
        while not typed.is_over:
            self._follow(_LOOK)
            match (typed.get(0.0) or "").split():
                case []:
                    continue
                case [word] if word in _QUIT:
                    return
                case [word] if word in FAULTS:
                    self._play_one(word, None, say)
                case [word, rank] if word in FAULTS and rank.isdecimal():
                    self._play_one(word, int(rank), say)
                case _:
                    say(usage)

    def _play_one(self, word: str, rank: int | None, say: Callable[[str], None]) -> None:
        try:
            outcome = play(self._course, self._hosts, word, rank)
        except NotRecovered as error:
            say(str(error))
            return
        self.outcomes.append(outcome)
        say(f"{outcome.happened}; {outcome.recovery}")

    def _await_whole(self) -> None:
        """Wait until all workers train, and the spare waits. Raises NotRecovered, JobEnded."""
        deadline = time.monotonic() + _START_LIMIT
        while not self._course.is_whole:
            if self._course.follow(deadline - time.monotonic()) is None:
                raise NotRecovered(f"not all workers train within {_START_LIMIT:g} s")

    def _follow(self, seconds: float) -> None:
        """Follow the job for some seconds. Raises JobEnded."""
        deadline = time.monotonic() + seconds
        while self._course.follow(deadline - time.monotonic()) is not None:
            pass

    def _end(self) -> None:
        """End the training and the job. Raises NotRecovered, JobEnded."""
        deadline = time.monotonic() + _END_LIMIT
        while not self._course.end_training():
            if time.monotonic() >= deadline:
                raise NotRecovered("no worker trains that could end it")
            self._follow(_LOOK)
