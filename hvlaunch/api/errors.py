"""What can go wrong when functions are called on hosts."""

from collections.abc import Sequence

from hvlaunch.errors import EXIT_HOSTS, BadUsage, HvlaunchError, Problem
from hvlaunch.job import WorkerExit

__all__ = ["CallNotPickled", "JobFailed", "JobStopped", "ResultLost", "ResultNotRead", "WorkerFailed"]


class CallNotPickled(BadUsage):
    """The function, or one of its arguments, can't be sent to other processes. Nothing was started."""


class JobFailed(HvlaunchError):
    """The job has ended, and no worker's own end is the cause: hosts can't be reached, or were lost. `problem` has all that is known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.cause, host=problem.host, hint=problem.hint)
        self.exit_code = problem.exit_code
        """That of hvlaunch's command line in such a case."""
        self._problem = problem

    @property
    def problem(self) -> Problem:
        """All that is known of it."""
        return self._problem


class JobStopped(HvlaunchError):
    """Somebody has stopped the job: `signal` is the number of the signal."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"the job was stopped by signal {signal}")
        self.signal = signal
        """Its number."""
        self.exit_code = 128 + signal
        """As of a shell's command."""


class WorkerFailed(HvlaunchError):
    """A worker has not returned a value. `__cause__` is what the function has raised, where it could be sent and read."""

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
        """Of the worker that failed first."""
        self.traceback = traceback
        """What the function has raised, as text, as its host has seen it; None where it has raised nothing."""
        self.end = end
        """How the worker's process has ended; None where that is not known."""
        self.others = tuple(others)
        """How the other workers have ended."""
        self.exit_code = 1 if end is None or end.ok else end.exit_code
        """The worker's; 1 where that has ended well."""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        text = f"rank {self.rank}{where}: {self.cause}"
        return f"{text}\n\n{self.traceback.rstrip()}" if self.traceback else text


class ResultNotRead(HvlaunchError):
    """What a rank has returned has come, and can't be unpickled here: `__cause__` says why."""

    exit_code = 1
    """That of a program that fails."""

    def __init__(self, cause: str, *, rank: int) -> None:
        super().__init__(f"rank {rank}: what it returned can't be unpickled here: {cause}")
        self.rank = rank
        """Whose result it is."""


class ResultLost(HvlaunchError):
    """The job has ended well, and there are no results: they were not kept, or are another process's."""

    exit_code = EXIT_HOSTS
    """69: there is nothing to be had."""
