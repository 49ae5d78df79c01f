"""`hvlaunch practise`: a training on pretended hosts, faults by its user, and the recoveries."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import hvlaunch
from hvlaunch.cli.practise_faults import FAULTS, Course, JobEnded, Lines, NotRecovered, Outcome, play
from hvlaunch.cli.process import print_answer
from hvlaunch.errors import BadUsage
from hvlaunch.gloo.controller import run
from hvlaunch.gloo.pretended_hosts import PretendedHosts
from hvlaunch.job import LONG_LEASE, ElasticOptions, Host, JobSpec
from hvlaunch.outside import NoJobDirectory, jobs_directory
from hvlaunch.owners import reason
from hvlaunch.practise_training import REPORTS

__all__ = ["recovery_table", "run_practise_command"]

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
