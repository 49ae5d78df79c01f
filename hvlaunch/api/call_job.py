"""A job whose workers call a function: begun by this process, and stopped with it."""

import atexit
import shutil
import tempfile
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from os import environ
from pathlib import Path
from typing import Any, TypeVar

from hvlaunch.api.child import Child
from hvlaunch.api.job import Job
from hvlaunch.api.returned import values
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult
from hvlaunch.outside.directory import jobs_directory
from hvlaunch.outside.known import KnownJob, known_job

__all__ = ["CallDirectory", "CallJob"]

R = TypeVar("R")

_BEGINNING = 60.0
"""Seconds within which a driver has an id for its job."""
_AT_EXIT = 30.0
"""Seconds that a process that ends waits for its jobs."""


class CallDirectory:
    """Where one call has its files on this machine: the program that the hosts get, and what the workers return."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix="hvlaunch-call-"))
        self.program = self.path / "program"

    def remove(self) -> None:
        """It may be gone already."""
        shutil.rmtree(self.path, ignore_errors=True)


class CallJob(Job[R]):
    """Its driver is a child of this process."""

    def __init__(self, child: Child, directory: CallDirectory, *, return_exceptions: bool) -> None:
        self._child = child
        self._directory = directory
        self._return_exceptions = return_exceptions
        weakref.finalize(self, _when_ended, child, directory).atexit = False
        _LIVE.add(self)

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
        for _ in range(1 + kill):
            self._child.stop()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, for so many seconds at most; its exit code (docs/exit-codes.md).

        Raises TimeoutError, and HvlaunchError where there was no job at all.
        """
        return self._await_end(timeout).exit_code

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for the end, for so many seconds at most; what each rank of the last round has returned.

        Raises TimeoutError; WorkerFailed where a worker has failed, JobFailed where hosts have, JobStopped,
        ResultNotRead; other kinds of HvlaunchError where there was no job at all.
        """
        result = self._await_end(timeout)
        return values(result, self._directory.path, return_exceptions=self._return_exceptions)

    def end(self) -> None:
        """Stop it if it has not ended, wait for that, and keep nothing of it. Ctrl-C meanwhile kills its workers."""
        while not self.ended.done():
            self._child.stop()
            with suppress(KeyboardInterrupt):
                self.ended.exception()
        self._directory.remove()

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


_LIVE: "weakref.WeakSet[CallJob[Any]]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """No job outlives the process that has begun it; the workers' ends are waited for."""
    jobs = list(_LIVE)
    for job in jobs:
        job._child.stop() if not job.ended.done() else None  # noqa: SLF001 (as a method)
    for job in jobs:
        with suppress(HvlaunchError, FutureTimeoutError):
            job.ended.result(_AT_EXIT)
        job._directory.remove()  # noqa: SLF001 (as above)


def _when_ended(child: Child, directory: CallDirectory) -> None:
    """Nobody has the job any more: what it leaves goes with its end."""
    child.result.add_done_callback(lambda _ended: directory.remove())


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HvlaunchError) else 1
