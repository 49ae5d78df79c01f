"""A job whose workers call a function: begun by this process, and stopped with it."""

import atexit
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from os import environ
from typing import Any, TypeVar

from hvlaunch.api.call_directory import CallDirectory
from hvlaunch.api.child import Child
from hvlaunch.api.job import Job
from hvlaunch.api.returned import values
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult
from hvlaunch.outside.directory import jobs_directory
from hvlaunch.outside.known import KnownJob, known_job

__all__ = ["CallJob"]

R = TypeVar("R")

_BEGINNING = 60.0
"""Seconds within which a driver has an id for its job."""
_AT_EXIT = 30.0
"""Seconds that a process that ends waits for its jobs."""


class CallJob(Job[R]):
    """Its driver is a child of this process. In one that was forked since it is a job like others."""

    def __init__(self, child: Child, directory: CallDirectory, *, return_exceptions: bool) -> None:
        self._child = child
        self._directory = directory
        self._return_exceptions = return_exceptions
        _LEFT[child] = directory
        weakref.finalize(self, _when_ended, child).atexit = False

    @property
    def ended(self) -> Future[JobResult]:
        """How the job has ended, when nothing of it is left. It can't be cancelled."""
        return self._child.result

    @property
    def state(self) -> str:
        if self.ended.done():
            error = self.ended.exception()
            return f"exit code {_code(error) if error is not None else self.ended.result().exit_code}"
        state = super().state
        return "connecting" if state in ("no answer", "driver killed") else state

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that are connected; of a job that has ended, those of its last workers."""
        if self.ended.done() and self.ended.exception() is None:
            return list(dict.fromkeys(end.host for end in self.ended.result().exits))
        return super().hosts

    def stop(self, *, kill: bool = False) -> None:
        """Stop the job as Ctrl-C does, or with `kill` as a second Ctrl-C. wait() waits for its end."""
        if not self._child.is_ours:
            super().stop(kill=kill)
            return
        for _ in range(1 + kill):
            self._child.stop()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, for so many seconds at most; its exit code (docs/exit-codes.md).

        Raises TimeoutError, and HvlaunchError where there was no job at all.
        """
        return self._await_end(timeout).exit_code if self._child.is_ours else super().wait(timeout)

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for the end, for so many seconds at most; what each rank of the last round has returned.

        Raises TimeoutError; WorkerFailed where a worker has failed, JobFailed where hosts have, JobStopped,
        ResultNotRead; other kinds of HvlaunchError where there was no job at all, and ResultLost in a process that was
        forked since.
        """
        if not self._child.is_ours:
            return super().results(timeout)
        result = self._await_end(timeout)
        return values(result, self._directory.path, return_exceptions=self._return_exceptions)

    def end(self) -> None:
        """Stop it if it has not ended, wait for that, and keep nothing of it. Ctrl-C meanwhile kills its workers."""
        while self._child.is_ours and not self.ended.done():
            self._child.stop()
            with suppress(KeyboardInterrupt):
                self.ended.exception()
        _remove(self._child)

    def _await_end(self, timeout: float | None) -> JobResult:
        try:
            return self.ended.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"the job has not ended within {timeout:g} s") from None

    def _known(self) -> KnownJob:
        """Raises HvlaunchError where there is no job."""
        job_id = self._child.job_id.result(_BEGINNING)
        directory = jobs_directory(environ) / job_id
        known = known_job(directory)
        return known or KnownJob(
            job_id, directory, {"id": job_id, "pid": self._child.pid}, None, has_driver=False
        )

    def _ending(self, job: KnownJob) -> Mapping[str, Any]:
        if not self._child.is_ours:
            return super()._ending(job)
        from hvlaunch.watch.recorder import result_record  # noqa: PLC0415 (slow to load)

        return result_record(self.ended.result())


_LEFT: dict[Child, CallDirectory] = {}
"""What there still is of calls."""


@atexit.register
def _end_all() -> None:
    """No job outlives the process that has begun it; the workers' ends are waited for."""
    children = [child for child in list(_LEFT) if child.is_ours]
    for child in children:
        child.stop()
    for child in children:
        with suppress(HvlaunchError, FutureTimeoutError):
            child.result.result(_AT_EXIT)
        _remove(child)


def _when_ended(child: Child) -> None:
    """Nobody has the job any more: what it leaves goes with its end."""
    child.result.add_done_callback(lambda _ended: _remove(child))


def _remove(child: Child) -> None:
    directory = _LEFT.get(child)
    if directory is not None:
        directory.remove()
        _LEFT.pop(child, None)  # not before: the end of this process waits for what is there


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HvlaunchError) else 1
