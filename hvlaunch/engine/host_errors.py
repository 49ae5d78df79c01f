"""What is wrong with hosts that the engine finds wanting."""

from hvlaunch.engine.events import HostFacts
from hvlaunch.errors import DiscoveryFailed, HostLost, Problem, StartTimeout, WorkingDirectoryMissing
from hvlaunch.hosts.placement import unlikely
from hvlaunch.job import JobSpec

__all__ = ["no_list", "no_start", "stuck", "unfit"]


def no_list() -> Problem:
    """Nobody says which hosts there are, not even that it can't be found out."""
    return DiscoveryFailed(
        "what finds the hosts does not answer",
        hint="look whether the hostfile or the script is on a file system that hangs",
    ).problem


def _no_directory(host: str, path: str, cause: str) -> Problem:
    """The workers' directory is not there, or can't be entered."""
    return WorkingDirectoryMissing(
        f"working directory {path}: {cause}",
        host=host,
        path=path,
        hint="--cwd DIR, with a directory that every host has",
    ).problem


def no_start(host: str, seconds: float, *, is_connected: bool) -> Problem:
    """It is not ready in time."""
    reached = "its agent does not answer" if is_connected else "no connection"
    return StartTimeout(
        f"{reached} within {seconds:g} s",
        host=host,
        hint=f"ssh {host} python3 --version, or a longer --start-timeout",
    ).problem


def stuck(host: str) -> Problem:
    """Its workers live on after SIGKILL."""
    return HostLost(
        "lost: its workers do not end, even after SIGKILL",
        host=host,
        hint="ps -eo pid,stat,wchan,args on that host: what is in state D waits for a disk or a driver",
    ).problem


def unfit(host: str, facts: HostFacts, slots: int, spec: JobSpec) -> Problem | None:
    """Why no worker can be started on a host with these slots."""
    if facts.cwd_error is not None:
        return _no_directory(host, spec.cwd, facts.cwd_error)
    if spec.force_slots or facts.gpus is not None:
        return None
    error = unlikely(host, slots, facts.cpus)
    return None if error is None else error.problem
