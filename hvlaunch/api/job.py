"""A job that runs: any of this user's on this machine, as hvlaunch's other programs see it."""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from operator import index
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from hvlaunch.api.errors import ResultLost
from hvlaunch.cli.jobs.commands import state_word
from hvlaunch.cli.jobs.view import await_output
from hvlaunch.console.stored import STREAMS, StoreReader
from hvlaunch.errors import BadUsage
from hvlaunch.outside.control import ControlClient, DriverGone, state_of
from hvlaunch.outside.directory import has_driver, jobs_directory
from hvlaunch.outside.known import KnownJob, await_driver, choose, has_ended, known_job, known_jobs, result_of
from hvlaunch.telemetry.stack import whole_stacks

__all__ = ["Job", "Line", "attach", "jobs"]

R = TypeVar("R")

_LOOK = 0.05
_PATIENCE = 5.0
_EVENTS_WAIT = 30
_STACKS_WAIT = 30.0


_GOOD_END: Mapping[str, Any] = {
    "exit_code": 0,
    **dict.fromkeys(("elapsed", "rank", "host", "first_victim", "interrupted", "error")),
}
"""Of a job whose directory is gone."""


class Line(NamedTuple):
    """A line that a worker has printed, without its end."""

    rank: int
    """Whose line it is."""
    stream: Literal["stdout", "stderr"]
    """Where the worker wrote it."""
    text: str
    """What it says; bytes that are not UTF-8 are replaced."""
    time: float
    """When hvlaunch got its end, in seconds since 1970."""


class Job(Generic[R]):
    """A job of this user on this machine, which goes on without this object. Its methods are for any thread.

    Launcher.start() makes one, whose workers call a function that returns R; attach() and jobs() give those that run already.
    """

    def __init__(self, known: KnownJob) -> None:
        self._found = known

    def __repr__(self) -> str:
        return f"<hvlaunch job {self.id}>"

    @property
    def id(self) -> str:
        """As `hvlaunch jobs` has it."""
        return self._known().id

    @property
    def state(self) -> str:
        """`connecting`, `running`, `finishing`, `stopping`, `closing`, `exit code 1`, …: the states of docs/jobs.md."""
        job = self._known()
        now = known_job(job.directory)
        if now is None:
            return "exit code 0"
        return state_word(now, None if now.result is not None else state_of(now, _PATIENCE))

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that are connected now."""
        state = state_of(self._known(), _PATIENCE)
        return [] if state is None else [host["host"] for host in state["hosts"] if host["state"] == "ready"]

    def output(self) -> Iterator[Line]:
        """The lines of all workers, as they come, until the job has ended.

        It begins with what is kept: all of it, up to 64 MiB, of a job of Launcher.start(), and of any other as `hvlaunch logs` has it.
        Of a job that could not begin there is none; wait() and results() say why. Raises DriverGone where nobody can keep it.
        """
        job = self._known()
        await_output(job)
        lines = _Lines()
        reader = StoreReader(job.directory)
        try:
            while True:
                is_over = has_ended(job) or not has_driver(job.directory)
                for item in reader.read():
                    if item.rank is not None:
                        yield from lines.split(item.rank, item.kind, item.data, item.time)
                if is_over:
                    yield from lines.rest()
                    return
                time.sleep(_LOOK)
        finally:
            reader.close()

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What has happened, and happens until the job ends: the objects of docs/events.md. The last is `job_ended`.

        hvlaunch keeps the newest, while the job runs. Where some are missing, there is an object of type `events_missed`
        in their place: `missed` is how many, or None where nobody knows. Raises DriverGone where the driver was killed.
        """
        job, number = self._known(), 0
        control = ControlClient(job)
        while True:
            try:
                found = control.get(f"/events?since={number}&wait={_EVENTS_WAIT}", _EVENTS_WAIT)
            except DriverGone:
                if await_driver(job):
                    time.sleep(_LOOK)
                    continue
                break
            number = found["next"]
            if found["missed"]:
                yield _event(job, time.time(), type="events_missed", missed=found["missed"])
            yield from found["events"]
            if any(event.get("type") == "job_ended" for event in found["events"]):
                return
        yield _event(job, time.time(), type="events_missed", missed=None)
        yield _event(job, job.ended or time.time(), type="job_ended", **self._ending(job))

    def stacks(self, ranks: Iterable[int] | None = None, *, native: bool = False) -> list[Mapping[str, Any]]:
        """What the workers are doing now: the objects of docs/control.md.

        `ranks` None is all; `native` is with the frames of C and C++, where their host has py-spy.
        Raises DriverGone, BadUsage.
        """
        wanted = None if ranks is None else _ranks(ranks)
        if wanted == "":
            return []
        answer = ControlClient(self._known()).post(
            "/stacks", {"ranks": wanted, "native": native}, _STACKS_WAIT
        )
        return [*whole_stacks(answer)]

    def signal(self, number: int | str) -> None:
        """Send a signal to all workers: `signal.SIGUSR1`, or "USR1". Raises DriverGone, ControlRefused, BadUsage."""
        name = _signal_name(number)
        ControlClient(self._known()).post("/signal", {"signal": name})

    def stop(self, *, kill: bool = False) -> None:
        """Stop the job as Ctrl-C does, or with `kill` as a second Ctrl-C. wait() waits for its end.

        Nothing happens where it has ended. Raises DriverGone where its driver does not answer.
        """
        job = self._known()
        if not has_ended(job):
            ControlClient(job).post("/stop", {"kill": kill})

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, for so many seconds at most; its exit code (docs/exit-codes.md).

        Raises TimeoutError; DriverGone where its driver was killed, and nobody knows how it ended.
        """
        job = self._known()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not has_ended(job):
            if not await_driver(job) and not has_ended(job):
                raise DriverGone(f"job {job.id}: its driver was killed")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job.id} has not ended within {timeout:g} s")
            time.sleep(_LOOK)
        result = result_of(job)
        return 0 if result is None else int(result["exit_code"])

    def results(self, timeout: float | None = None) -> list[R]:  # noqa: ARG002 (others wait)
        """Wait for the end; what each rank of the last round has returned.

        Only the process that has started a job gets its results: raises ResultLost in any other.
        """
        raise ResultLost(f"job {self.id}: the results are those of the process that has started it")

    def _known(self) -> KnownJob:
        return self._found

    def _ending(self, job: KnownJob) -> Mapping[str, Any]:
        """How the job has ended: fields of `job_ended`. Raises DriverGone where nobody knows."""
        result = result_of(job)
        if result is None and not has_ended(job):
            raise DriverGone(f"job {job.id}: its driver was killed")
        return _GOOD_END if result is None else result


class _Lines:
    """Makes lines of what workers write."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, Literal["stdout", "stderr"]], tuple[bytes, float]] = {}

    def split(self, rank: int, kind: str, data: bytes, when: float) -> Iterator[Line]:
        """Those that end in this; where a stream has ended, its rest."""
        stream: Literal["stdout", "stderr"] = "stdout" if kind.startswith("stdout") else "stderr"
        rest, _ = self._parts.pop((rank, stream), (b"", when))
        if kind in STREAMS:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield _line(rank, stream, line, when)
            self._parts[rank, stream] = rest, when
        elif rest:
            yield _line(rank, stream, rest, when)

    def rest(self) -> Iterator[Line]:
        """Those that never ended."""
        for (rank, stream), (data, when) in self._parts.items():
            if data:
                yield _line(rank, stream, data, when)


def _line(rank: int, stream: Literal["stdout", "stderr"], data: bytes, when: float) -> Line:
    return Line(rank, stream, data.rstrip(b"\r").decode(errors="replace"), when)


def _event(job: KnownJob, when: float, **fields: object) -> Mapping[str, Any]:
    text = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    return {"time": text.replace("+00:00", "Z"), "job": job.id, **fields}


def _ranks(ranks: Iterable[int]) -> str:
    """As the driver reads them. Raises BadUsage."""
    try:
        numbers = [index(rank) for rank in ranks]
    except TypeError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise BadUsage(
            f"ranks={ranks!r}: these are no numbers of ranks", hint="ranks=[0, 8], or None for all"
        )
    return ",".join(map(str, numbers))


def _signal_name(number: int | str) -> str:
    """Raises BadUsage."""
    text = number.upper().removeprefix("SIG") if isinstance(number, str) else ""
    for each in signal.Signals:
        if each == number or each.name == f"SIG{text}":
            return each.name
    raise BadUsage(f"{number!r} is not a signal", hint='"USR1", or signal.SIGUSR1')


def jobs() -> list[Job[Any]]:
    """All jobs of this user on this machine, the newest last: those that run, and those that ended lately. Raises NoJobDirectory."""
    return [Job(each) for each in known_jobs(jobs_directory(os.environ))]


def attach(job: str | None = None) -> Job[Any]:
    """The job of this id (four letters of it will do) or name; without one, the only job that runs.

    Nothing happens to the job when the object goes. Raises BadUsage where there is no such job, NoJobDirectory.
    """
    if not isinstance(job, str | None):
        raise BadUsage(f"attach({job!r}): the id or the name of a job is a text", hint="hvlaunch.jobs()")
    return Job(choose(known_jobs(jobs_directory(os.environ)), job))
