"""A running job of this user on this machine, seen from another process."""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from operator import index
from typing import Any, Generic, Literal, TypeVar

from hvlaunch.api.errors import ResultLost
from hvlaunch.cli.jobs import state_word
from hvlaunch.cli.jobs.output import await_output
from hvlaunch.console.output_store import STREAMS, StoreReader
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import (
    KnownJob,
    await_driver,
    choose,
    has_driver,
    has_ended,
    jobs_directory,
    known_job,
    known_jobs,
    result_of,
)
from hvlaunch.outside.control import ControlClient, DriverGone, await_ready, state_of
from hvlaunch.telemetry.stack import whole_stacks

__all__ = ["Job", "Line", "attach", "jobs"]

R = TypeVar("R")

_LOOK = 0.05
_PATIENCE = 5.0
_EVENTS_WAIT = 30
_STACKS_WAIT = 30.0


# A job in a terminal that ended well leaves no directory, so its result is not on the disk.
_GOOD_END: Mapping[str, Any] = {
    "exit_code": 0,
    **dict.fromkeys(("elapsed", "rank", "host", "first_victim", "interrupted", "error")),
}
"""Result of a job whose directory is gone."""


class Line(NamedTuple):
    """A line of a worker's output, without its line end."""

    rank: int
    """Rank of the worker."""
    stream: Literal["stdout", "stderr"]
    """Stream of the worker."""
    text: str
    """The line; bytes that are not UTF-8 are replaced."""
    time: float
    """Arrival of its end at hvlaunch, in seconds since 1970."""


class Job(Generic[R]):
    """A job of this user on this machine, which continues without this object. Thread-safe.

    Launcher.start() starts a job whose workers call a function that returns R; attach() and jobs() return running jobs.
    """

    def __init__(self, job: KnownJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<hvlaunch job {self.id}>"

    @property
    def id(self) -> str:
        """The id, as `hvlaunch jobs` shows it."""
        return self._known().id

    @property
    def state(self) -> str:
        """`connecting`, `running`, `finishing`, `stopping`, `closing`, `exit code 1`, …: the states of docs/guides/log-out.md."""
        job = self._known()
        # Read the directory anew: the job may have ended since this object was made.
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
        """Yield the lines of all workers, as they come, until the job has ended.

        The first lines are the kept ones: of a job of Launcher.start() all lines up to 64 MiB, of other jobs those of
        `hvlaunch logs`. A job that could not be started has no lines; wait() and results() have its error. Raises DriverGone if
        the output can't be kept.
        """
        job = self._known()
        await_output(job)
        lines = _Lines()
        reader = StoreReader(job.directory)
        try:
            while True:
                # Asked before the output is read: the last lines are there before the end.
                is_over = has_ended(job) or not has_driver(job.directory)
                for item in reader.read():
                    if item.rank is not None:
                        yield from lines.split(item.rank, item.kind, item.data, item.time)
                if is_over:
                    yield from lines.unfinished()
                    return
                time.sleep(_LOOK)
        finally:
            reader.close()

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield all events until the job ends: the objects of docs/interfaces/events.md. The last is `job_ended`.

        hvlaunch keeps the newest events while the job runs. An object of type `events_missed` stands for missing events;
        its `missed` is their number, or None if unknown. Raises DriverGone if the driver was killed.
        """
        job, number = self._known(), 0
        control = ControlClient(job)
        while True:
            try:
                page = control.get(f"/events?since={number}&wait={_EVENTS_WAIT}", _EVENTS_WAIT)
            except DriverGone:
                # A successor may have taken the job over; its control socket is there after a moment.
                if await_driver(job):
                    time.sleep(_LOOK)
                    continue
                break
            number = page["next"]
            # The driver keeps a limited number of events, and this reader was too slow.
            if page["missed"]:
                yield _event(job, time.time(), type="events_missed", missed=page["missed"])
            yield from page["events"]
            if any(event.get("type") == "job_ended" for event in page["events"]):
                return
        # The driver has gone before it sent its last event.
        yield _event(job, time.time(), type="events_missed", missed=None)
        yield _event(job, job.ended or time.time(), type="job_ended", **self._ending(job))

    def stacks(self, ranks: Iterable[int] | None = None, *, native: bool = False) -> list[Mapping[str, Any]]:
        """Return the stacks of the workers now: the objects of docs/interfaces/control.md.

        Without `ranks` of all ranks; with `native` also the frames of C and C++, on hosts that have py-spy.
        Raises DriverGone, BadUsage.
        """
        # No ranks at all: the driver would take an empty text for all ranks.
        numbers = None if ranks is None else _ranks(ranks)
        if numbers == "":
            return []
        answer = ControlClient(self._known()).post(
            "/stacks", {"ranks": numbers, "native": native}, _STACKS_WAIT
        )
        return [*whole_stacks(answer)]

    def signal(self, number: int | str) -> None:
        """Send a signal to all workers: `signal.SIGUSR1`, or "USR1". Raises DriverGone, ControlRefused, BadUsage."""
        name = _signal_name(number)
        ControlClient(self._known()).post("/signal", {"signal": name})

    def stop(self, *, kill: bool = False) -> None:
        """Stop the job as Ctrl-C does, or with `kill` as a second Ctrl-C. wait() waits for its end.

        Does nothing after the job's end. Raises DriverGone if its driver does not answer.
        """
        job = self._known()
        if not has_ended(job):
            ControlClient(job).post("/stop", {"kill": kill})

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, at most `timeout` seconds; return its exit code (docs/reference/exit-codes.md).

        Raises TimeoutError; DriverGone if its driver was killed before the job ended.
        """
        job = self._known()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not has_ended(job):
            # The result is written before the driver's lock is released: ask for it again.
            if not await_driver(job) and not has_ended(job):
                raise DriverGone(f"job {job.id}: its driver was killed")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job.id} has not ended within {timeout:g} s")
            time.sleep(_LOOK)
        result = result_of(job)
        return 0 if result is None else int(result["exit_code"])

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the job's service is ready: its `ready_port` takes connections, or its `ready_url` answers.

        Raises TimeoutError after `timeout` seconds; DriverGone if the job ends before; BadUsage without either.
        """
        job = self._known()
        if not await_ready(job, timeout):
            raise DriverGone(f"job {job.id}: it has ended before its service was ready")

    def results(self, timeout: float | None = None) -> list[R]:  # noqa: ARG002 (the subclass waits)
        """Wait for the end; return the values of the last round's functions, by rank.

        Only the process that has started a job gets its results; raises ResultLost in other processes.
        """
        raise ResultLost(f"job {self.id}: only the process that started it has its results")

    def _known(self) -> KnownJob:
        return self._job

    def _ending(self, job: KnownJob) -> Mapping[str, Any]:
        """Return the fields of `job_ended`. Raises DriverGone if the end is unknown."""
        result = result_of(job)
        if result is None and not has_ended(job):
            raise DriverGone(f"job {job.id}: its driver was killed")
        return _GOOD_END if result is None else result


class _Lines:
    """Splits the output of workers into lines."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, Literal["stdout", "stderr"]], tuple[bytes, float]] = {}

    def split(self, rank: int, kind: str, data: bytes, when: float) -> Iterator[Line]:
        """Yield the lines that end in this data; at the end of a stream also an unfinished line."""
        stream: Literal["stdout", "stderr"] = "stdout" if kind.startswith("stdout") else "stderr"
        pending, _ = self._parts.pop((rank, stream), (b"", when))
        if kind in STREAMS:
            *whole, pending = (pending + data).split(b"\n")
            for line in whole:
                yield _line(rank, stream, line, when)
            self._parts[rank, stream] = pending, when
        elif pending:
            yield _line(rank, stream, pending, when)

    def unfinished(self) -> Iterator[Line]:
        """Yield the lines that never ended."""
        for (rank, stream), (data, when) in self._parts.items():
            if data:
                yield _line(rank, stream, data, when)


def _line(rank: int, stream: Literal["stdout", "stderr"], data: bytes, when: float) -> Line:
    return Line(rank, stream, data.rstrip(b"\r").decode(errors="replace"), when)


def _event(job: KnownJob, when: float, **fields: object) -> Mapping[str, Any]:
    text = datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")
    return {"time": text.replace("+00:00", "Z"), "job": job.id, **fields}


def _ranks(ranks: Iterable[int]) -> str:
    """Format ranks for the driver. Raises BadUsage."""
    try:
        # index() refuses floats, and takes the integers of numpy.
        numbers = [index(rank) for rank in ranks]
    except TypeError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise BadUsage(f"ranks={ranks!r}: these are not rank numbers", hint="ranks=[0, 8], or None for all")
    return ",".join(map(str, numbers))


def _signal_name(number: int | str) -> str:
    """Raises BadUsage."""
    text = number.upper().removeprefix("SIG") if isinstance(number, str) else ""
    for candidate in signal.Signals:
        if candidate == number or candidate.name == f"SIG{text}":
            return candidate.name
    raise BadUsage(f"{number!r} is not a signal", hint='"USR1", or signal.SIGUSR1')


def jobs() -> list[Job[Any]]:
    """Return the running and recent jobs of this user on this machine, the newest last. Raises NoJobDirectory."""
    return [Job(job) for job in known_jobs(jobs_directory(os.environ))]


def attach(job: str | None = None) -> Job[Any]:
    """Return the job with this id (four letters suffice) or name; without a name, the only running job.

    The job continues when the object is gone. Raises BadUsage if there is no such job, NoJobDirectory.
    """
    if not isinstance(job, str | None):
        raise BadUsage(
            f"attach({job!r}): the id or the name of a job must be a string", hint="hvlaunch.jobs()"
        )
    return Job(choose(known_jobs(jobs_directory(os.environ)), job))
