"""Errors of calling functions on hosts."""

import re
from collections.abc import Sequence

from hvlaunch.errors import EXIT_HOSTS, BadUsage, HvlaunchError, Problem
from hvlaunch.job import WorkerExit

__all__ = [
    "CallNotPickled",
    "JobFailed",
    "JobStopped",
    "ResultLost",
    "ResultNotRead",
    "WorkerFailed",
    "in_python",
]


def in_python(hint: str | None) -> str | None:
    """Return the hint with options as arguments of Python: `np=2` for `-np 2`."""
    return None if hint is None else re.sub(r"(?<!\S)-np (\d+)", r"np=\1", hint)


class CallNotPickled(BadUsage):
    """The function or an argument can't be sent to other processes, as with a lock, a socket or a file. The job was not started.

    Try: make the object inside the function.
    """


class JobFailed(HvlaunchError):
    """The job has failed, but not because of a worker: hosts can't be reached, or were lost. `problem.kind` is the name of the error.

    Try: `problem.hint`, or the error's row in docs/reference/errors.md.
    """

    def __init__(self, problem: Problem) -> None:
        problem = problem._replace(hint=in_python(problem.hint))
        super().__init__(problem.cause, host=problem.host, hint=problem.hint)
        self.exit_code = problem.exit_code
        """The exit code of `hvlaunch` for the same error."""
        self._problem = problem

    @property
    def problem(self) -> Problem:
        """The cause, with host and hint."""
        return self._problem


class JobStopped(HvlaunchError):
    """The job was stopped by a signal: by `job.stop()`, by `hvlaunch stop`, or by another program.

    Try: start the job again, unless the stop was on purpose; `signal` is the signal's number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(f"the job was stopped by signal {signal}")
        self.signal = signal
        """Number of the signal."""
        self.exit_code = 128 + signal
        """128 + the signal."""


class WorkerFailed(HvlaunchError):
    """A function raised something, or its process ended: `rank` has no value. `__cause__` is the exception, if it could be pickled and
    unpickled.

    Try: `traceback`, `end` and `others`, as in docs/guides/python.md#when-something-fails.
    """

    def __init__(
        self,
        cause: str,
        *,
        rank: int,
        host: str,
        traceback: str | None = None,
        end: WorkerExit | None = None,
        others: Sequence[WorkerExit] = (),
    ) -> None:
        super().__init__(cause, host=host or None)
        self.rank = rank
        """Rank of the worker that failed first."""
        self.traceback = traceback
        """Traceback of the function on its host, as text; None without an exception."""
        self.end = end
        """End of the worker's process; None if unknown."""
        self.others = tuple(others)
        """Ends of the other workers."""
        self.is_printed = False
        """True if the job's output, with the traceback, was printed here. The message is then without it."""
        self.exit_code = 1 if end is None or end.ok else end.exit_code
        """The worker's exit code; 1 if the process itself ended well."""

    def __str__(self) -> str:
        place = f" on {self.host}" if self.host else ""
        text = f"rank {self.rank}{place}: {self.cause}"
        return f"{text}\n\n{self.traceback.rstrip()}" if self.traceback and not self.is_printed else text


class ResultNotRead(HvlaunchError):
    """The value that a rank returned can't be unpickled in this process; `__cause__` says why.

    Try: the same packages here as on the hosts, or return plain data.
    """

    exit_code = 1
    """As of a program that fails."""

    def __init__(self, cause: str, *, rank: int) -> None:
        super().__init__(f"rank {rank}: its value can't be unpickled here: {cause}")
        self.rank = rank
        """Rank of the worker that returned it."""


class ResultLost(HvlaunchError):
    """The job has ended well, but this process has no results: they were not kept, or belong to the process that started the job.

    Try: let the function write a file.
    """

    exit_code = EXIT_HOSTS
    """69: the results are not available."""
