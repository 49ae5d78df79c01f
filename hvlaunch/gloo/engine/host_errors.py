"""What is said of hosts that the engine finds wanting, and of a job as it goes."""

import signal
from collections.abc import Iterable

from hvlaunch.errors import HostLost, StartTimeout, WorkingDirectoryMissing

__all__ = [
    "count",
    "interrupted",
    "lack",
    "left_over",
    "no_directory",
    "no_rendezvous",
    "no_start",
    "not_closing",
    "stuck",
]


def no_directory(host: str, path: str, cause: str) -> WorkingDirectoryMissing:
    """The workers' directory is not there, or can't be entered."""
    return WorkingDirectoryMissing(
        f"working directory {path}: {cause}",
        host=host,
        path=path,
        hint="--cwd DIR, a directory that is there on every host",
    )


def no_start(host: str, seconds: float, *, is_connected: bool) -> StartTimeout:
    """It is not ready in time."""
    reached = "its agent does not answer" if is_connected else "no connection"
    return StartTimeout(
        f"{reached} within {seconds:g} s",
        host=host,
        hint=f"ssh {host} python3 --version, or a longer --start-timeout",
    )


def stuck(host: str) -> HostLost:
    """Its workers live on after SIGKILL."""
    return HostLost("lost: workers there do not end, whatever they are sent", host=host)


def lack(host: str, trouble: str) -> str:
    """Its kernel lacks what the guardian needs."""
    return f"host {host}: {trouble}: what a worker detaches there may outlive the job"


def no_rendezvous(host: str, tried: Iterable[str], port: int) -> str:
    """It reaches the driver at none of these addresses."""
    where = ", ".join(f"{one}:{port}" for one in tried)
    return f"host {host}: can't reach the driver's rendezvous (tried {where}); HVLAUNCH_RENDEZVOUS is unset there"


def left_over(host: str, count: int) -> str:
    """Processes of the job live on there after SIGKILL."""
    return (
        f"host {host}: {count} processes of the job can't be killed (another user's, or stuck in the kernel)"
    )


def not_closing(host: str) -> str:
    """It was let go of, and does not answer."""
    return f"host {host}: does not close; its agent still ends what is left there"


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interrupted(number: int, grace: float) -> str:
    """What a signal to hvlaunch leads to. Its own SIGPIPE can't come once more."""
    if number == signal.SIGPIPE:
        return f"nobody reads the output any more: workers have {grace:g} s to end"
    name = signal.Signals(number).name
    return f"got {name}: workers have {grace:g} s to end; once more kills them at once"
