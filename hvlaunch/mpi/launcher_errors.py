"""What can go wrong with somebody else's launcher."""

from hvlaunch.errors import EXIT_HOSTS, BadUsage, HostError, HvlaunchError

__all__ = ["EndedByLauncher", "LauncherFailed", "NoLauncher", "UnknownLauncher"]


class EndedByLauncher(HostError):
    """The launcher ended its processes on the host; `status` is its own exit status, None where it still runs."""

    def __init__(self, cause: str, *, host: str, status: int | None) -> None:
        super().__init__(cause, host=host)
        self.status = status
        self.exit_code = status or EXIT_HOSTS


class NoLauncher(BadUsage):
    """There is no such program. `program` is what was looked for."""

    def __init__(self, cause: str, *, program: str, hint: str) -> None:
        super().__init__(cause, hint=hint)
        self.program = program


class UnknownLauncher(NoLauncher):
    """The program is there, and does not say that it is a launcher that we know. `answer` is what it printed."""

    def __init__(self, cause: str, *, program: str, hint: str, answer: str) -> None:
        super().__init__(cause, program=program, hint=hint)
        self.answer = answer


class LauncherFailed(HvlaunchError):
    """The launcher ended, or its processes are not what was asked for; it prints its own reasons."""

    exit_code = EXIT_HOSTS
