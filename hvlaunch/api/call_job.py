"""A job whose workers call a function, and its results. This process has started it, and stops it at its own end."""

import atexit
import io
import json
import pickle
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from os import environ
from pathlib import Path
from typing import Any, TypeVar

from hvlaunch.api.archive import CallDirectory
from hvlaunch.api.child import Child
from hvlaunch.api.errors import JobFailed, JobStopped, ResultNotRead, WorkerFailed
from hvlaunch.api.in_worker import MARK, SIZE
from hvlaunch.api.job import Job
from hvlaunch.driver.result_files import PROBLEM
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.outside import KnownJob, jobs_directory, known_job

__all__ = ["CallJob", "error_of", "values"]

R = TypeVar("R")

_BEGINNING = 60.0
"""Seconds that a driver gets to make the job's id."""
_AT_EXIT = 30.0
"""Seconds for which an ending process waits for its jobs."""


class CallJob(Job[R]):
    """A job whose driver is a child of this process. In a forked process it is a job like any other."""

    def __init__(self, child: Child, directory: CallDirectory, *, return_exceptions: bool) -> None:
        self._child = child
        self._directory = directory
        self._return_exceptions = return_exceptions
        # At the end of this process, _end_all() also stops jobs whose objects are gone.
        _LEFT[child] = directory
        # Not at exit: _end_all() does it then, in the right order.
        weakref.finalize(self, _when_ended, child).atexit = False

    @property
    def ended(self) -> Future[JobResult]:
        """The job's result, when its driver has ended. The future can't be cancelled."""
        return self._child.result

    @property
    def state(self) -> str:
        if self.ended.done():
            error = self.ended.exception()
            return f"exit code {_code(error) if error is not None else self.ended.result().exit_code}"
        state = super().state
        # The driver is starting, or has just ended; its future decides.
        return "connecting" if state in ("no answer", "driver killed") else state

    @property
    def hosts(self) -> list[str]:
        """The names of the connected hosts; after the job, the hosts of its last workers."""
        if self.ended.done() and self.ended.exception() is None:
            return list(dict.fromkeys(end.host for end in self.ended.result().exits))
        return super().hosts

    def stop(self, *, kill: bool = False) -> None:
        """Stop the job as Ctrl-C does, or with `kill` as a second Ctrl-C. wait() waits for its end."""
        if not self._child.is_ours:
            super().stop(kill=kill)
            return
        # The driver takes a second signal as a second Ctrl-C, and kills the workers.
        for _ in range(1 + kill):
            self._child.stop()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, at most `timeout` seconds; return its exit code (docs/reference/exit-codes.md).

        Raises TimeoutError, and HvlaunchError if the job could not be started.
        """
        return self._await_end(timeout).exit_code if self._child.is_ours else super().wait(timeout)

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for the end, at most `timeout` seconds; return the values of the last round's functions, by rank.

        Raises TimeoutError, WorkerFailed for a failed worker, JobFailed for failed hosts, JobStopped, ResultNotRead;
        other HvlaunchErrors if the job could not be started, and ResultLost in a forked process.
        """
        if not self._child.is_ours:
            return super().results(timeout)
        result = self._await_end(timeout)
        return values(result, self._directory.path, return_exceptions=self._return_exceptions)

    def stop_and_forget(self) -> None:
        """Stop the job if it runs, wait for its end, and remove its files. Ctrl-C meanwhile kills its workers."""
        # Each Ctrl-C of an impatient user sends another stop, and the second kills.
        while self._child.is_ours and not self.ended.done():
            self._child.stop()
            with suppress(KeyboardInterrupt):
                self.ended.exception()
        _remove(self._child)

    def _await_end(self, timeout: float | None) -> JobResult:
        try:
            return self.ended.result(timeout)
        # Python 3.10 has two classes of this name, and callers catch the built-in one.
        except FutureTimeoutError:
            raise TimeoutError(f"the job has not ended within {timeout:g} s") from None

    def _known(self) -> KnownJob:
        """Raises HvlaunchError if the job could not be started."""
        job_id = self._child.job_id.result(_BEGINNING)
        directory = jobs_directory(environ) / job_id
        job = known_job(directory)
        return job or KnownJob(
            job_id, directory, {"id": job_id, "pid": self._child.pid}, None, has_driver=False
        )

    def _ending(self, job: KnownJob) -> Mapping[str, Any]:
        if not self._child.is_ours:
            return super()._ending(job)
        from hvlaunch.watch.recorder import result_record  # noqa: PLC0415 (slow to load)

        return result_record(self.ended.result())


_LEFT: dict[Child, CallDirectory] = {}
"""Directories of calls that have not been removed."""


@atexit.register
def _end_all() -> None:
    """Stop all jobs at the end of this process, and wait for their workers."""
    # All jobs are told first, so that they end at the same time.
    # A copy: the threads of ending jobs remove their entries meanwhile.
    children = [child for child in list(_LEFT) if child.is_ours]
    for child in children:
        child.stop()
    for child in children:
        with suppress(HvlaunchError, FutureTimeoutError):
            child.result.result(_AT_EXIT)
        _remove(child)


def _when_ended(child: Child) -> None:
    """Remove the files of a job, whose object is gone, when it ends."""
    child.result.add_done_callback(lambda _ended: _remove(child))


def _remove(child: Child) -> None:
    directory = _LEFT.get(child)
    if directory is not None:
        directory.remove()
        # Removed from the table last: the end of this process waits for the calls that are in it.
        _LEFT.pop(child, None)


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HvlaunchError) else 1


_MOST_FACTS = 1 << 24


def values(result: JobResult, directory: Path, *, return_exceptions: bool) -> list[Any]:
    """Return the values of the last round's functions, by rank; None for a rank that was stopped after a good end.

    Raises WorkerFailed, JobFailed, JobStopped, ResultNotRead; with `return_exceptions` errors of single ranks are in the list.
    """
    # The failure of the job; errors of single ranks come below.
    error = None if result.exit_code == 0 else error_of(result, directory)
    if error is not None and not (return_exceptions and result.size):
        raise error
    outcomes = [_value(result, directory, rank, error) for rank in range(result.size)]
    if not return_exceptions:
        for value in outcomes:
            if isinstance(value, _Failure):
                raise value.error
    return [value.error if isinstance(value, _Failure) else value for value in outcomes]


class _Failure:
    """The error of a rank without a value. A value may be an exception itself, so a type of its own tells them apart."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def error_of(result: JobResult, directory: Path) -> Exception:
    """Return the cause of the job's failure."""
    if result.interrupted is not None:
        return JobStopped(result.interrupted)
    if result.failure is not None:
        return _failed(result, directory, result.failure.rank)
    if result.error is not None:
        return JobFailed(result.error)
    return _failed(result, directory, next((end.rank for end in result.exits if not end.ok), 0))


def _value(result: JobResult, directory: Path, rank: int, error: Exception | None) -> Any:
    path = directory / str(rank)
    facts, end = _facts(path), _ends(result).get(rank)
    has_failed = error is not None and end is not None and _has_failed(end)
    if facts is not None and facts["kind"] == "value" and not has_failed:
        try:
            with path.open("rb") as file:
                return pickle.load(file)  # noqa: S301 (of a worker of this user's, over the job's session: docs/explain/security.md)
        except Exception as cause:  # noqa: BLE001 (of any kind: unpickling runs the value's own code)
            unread = ResultNotRead(_one_line(cause), rank=rank)
            unread.__cause__ = cause
            return _Failure(unread)
    # A job may end well although some workers were stopped, as the spare ones of an elastic job.
    if error is None and facts is None and end is not None and end.stopped:
        return None
    if facts is None and isinstance(error, JobFailed | JobStopped) and (end is None or end.stopped):
        return _Failure(error)
    return _Failure(_failed(result, directory, rank))


def _has_failed(end: WorkerExit) -> bool:
    """True if the worker failed by itself."""
    return not end.stopped and (end.signal is not None or end.code not in (None, 0))


def _failed(result: JobResult, directory: Path, rank: int) -> WorkerFailed:
    facts, ends = _facts(directory / str(rank)), _ends(result)
    end = ends.get(rank)
    is_error = facts is not None and facts["kind"] == "error"
    error = WorkerFailed(
        f"{facts['type']}: {facts['text']}"
        if facts is not None and is_error
        else _cause(end, directory, rank, has_returned=facts is not None),
        rank=rank,
        host="" if end is None else end.host,
        traceback=facts["traceback"] if facts is not None and is_error else None,
        end=end,
        others=[worker for number, worker in sorted(ends.items()) if number != rank],
    )
    if facts is not None and is_error:
        error.__cause__ = _raised(directory / str(rank), facts)
    return error


def _cause(end: WorkerExit | None, directory: Path, rank: int, *, has_returned: bool) -> str:
    # The driver writes this file if it could not store the result.
    with suppress(OSError):
        return f"its value could not be kept: {(directory / f'{rank}{PROBLEM}').read_text()}"
    if end is None:
        return "its end is unknown"
    if end.not_started is not None:
        return f"it could not be started: {end.not_started}"
    if end.stopped:
        return "it was stopped because the job had failed"
    if end.oom_killed:
        cause = "it was killed because its host ran out of memory"
    elif end.signal is not None:
        cause = f"it was ended by signal {end.signal}"
    else:
        cause = f"it ended with exit code {end.code}" + ("" if has_returned else ", and returned no value")
    return f"{cause}, after it had returned" if has_returned else cause


def _ends(result: JobResult) -> Mapping[int, WorkerExit]:
    return {end.rank: end for end in result.exits}


def _facts(path: Path) -> Mapping[str, Any] | None:
    """Read the facts at the end of a result file; None if the file is incomplete."""
    tail = len(MARK) + SIZE.size
    try:
        with path.open("rb") as file:
            end = file.seek(0, io.SEEK_END)
            file.seek(max(0, end - tail))
            last = file.read()
            # The worker was killed while it wrote, or has exited without a result.
            if len(last) != tail or not last.endswith(MARK):
                return None
            (size,) = SIZE.unpack_from(last)
            # A damaged file may have any number here: its seek must not leave the file, nor its
            # read fill the memory.
            file.seek(max(0, end - tail - min(size, _MOST_FACTS)))
            facts: Mapping[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError):
        return None
    # The sizes must add up: a worker may have printed into the pipe.
    return facts if facts["start"] + facts["size"] + size + tail == end else None


def _raised(path: Path, facts: Mapping[str, Any]) -> BaseException | None:
    """Return the exception of the function, if it could be pickled and can be unpickled here."""
    with suppress(Exception), path.open("rb") as file:
        file.seek(facts["start"])
        error = pickle.loads(file.read(facts["size"]))  # noqa: S301 (as above)
        # Unpickling runs the user's code, which may return anything.
        if isinstance(error, BaseException):
            return error
    return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
