"""The errors for the ends of hosts: each with its cause, and a hint what to try."""

from hvlaunch.agent.container import CAUSE, HINT
from hvlaunch.agent.wire.frames import BadFrame, plain
from hvlaunch.driver.program import NO_PYTHON
from hvlaunch.errors import (
    AgentFailed,
    ChannelGarbled,
    ContainerFailed,
    HostError,
    HostLost,
    NoPython,
    ProtocolBroken,
)

__all__ = ["broken", "ended", "garbled", "lost", "never_began", "quoted", "unread"]

_LONGEST_LINE = 500
"""Characters of a line that are quoted of a host."""
_NOT_FOUND = 127
_TIMED_OUT = 128 + 14
"""SIGALRM has ended it: the timer on its command line."""
_LOST_HINT = "look at the system log of that host, if nobody killed its agent"
_HINTS = {
    "heard nothing from the driver": "a longer --lease, if hvlaunch was stopped (Ctrl-Z) or this machine slept; otherwise check the network between the two",
    "can't start new thread": "ulimit -a on that host: a limit is too low",
    "Cannot fork": "ulimit -a on that host: a limit is too low",
    "MemoryError": "free -h and ulimit -a on that host: it has too little memory, or a limit is too low",
    "Resource temporarily unavailable": "ulimit -a on that host: a limit is too low",
    "Too many open files": "ulimit -n on that host: the limit is too low",
    "no place for temporary files": "df /tmp and df -i /tmp on that host, or set TMPDIR in its login shell",
}


def lost(host: str, cause: str) -> HostLost:
    """The error for a host that was ready and is gone."""
    return HostLost(f"lost: {cause}", host=host, hint=_hint(cause, _LOST_HINT))


def ended(
    host: str, parting: str | None, no_other: str | None, broken: str | None, stderr: str, status: int | None
) -> HostLost:
    """The error for an agent that ended, or whose connection broke.

    `parting` is its own announcement, `no_other` the reason why there is no other connection.
    """
    if parting is not None:
        cause = f"its agent ended: {parting}"
    elif no_other is not None:
        cause = f"the connection broke ({broken or 'it ended'}), and there is no other: {no_other}"
    elif broken is not None:
        cause = f"the connection broke: {broken}"
    else:
        last = plain(stderr.rpartition("\n")[2], _LONGEST_LINE)
        cause = last or f"its agent ended with status {status}"
    return lost(host, cause)


def unread(host: str) -> HostLost:
    """The error for an agent that waited in vain for a successor to fetch its workers' last output."""
    return HostLost(
        "lost: its agent ended, since no driver came within the lease; its workers had ended, and their last output is lost",
        host=host,
        hint="a longer --lease, if a job may be without a driver for longer",
    )


def quoted(traceback: bytes) -> str:
    """Return a host's traceback as text that is safe to print."""
    lines = traceback.decode("utf-8", "replace").splitlines()
    return "\n".join(plain(line, _LONGEST_LINE) for line in lines)


def broken(host: str, error: BadFrame) -> ProtocolBroken:
    """The error for a host whose agent sent an unexpected frame."""
    return ProtocolBroken(
        f"lost: it sent data that no hvlaunch agent sends: {error}",
        host=host,
        hint="find out whether that host, and your other programs on it, can be trusted",
    )


def garbled(host: str) -> ChannelGarbled:
    """The error for a host where another program wrote into the agent's channel."""
    return ChannelGarbled(
        "lost: another program on it wrote into the middle of its agent's messages",
        host=host,
        hint="change the shell start-up files of that host: they leave a program running that prints",
    )


def never_began(
    name: str, status: int | None, stderr: str, broken: str | None, noise: bytes, image: str | None = None
) -> HostError:
    """The error for a host whose agent has sent nothing; `noise` is the output of other programs, `image` the container's."""
    # The command prints NO_PYTHON itself; a shell without the command exits with the same status.
    if status == _NOT_FOUND and NO_PYTHON in stderr:
        tried = plain(stderr.partition(NO_PYTHON)[2].partition("\n")[0].strip(), _LONGEST_LINE)
        return NoPython(
            f"no Python >= 3.8 was found{f' in {image}' if image else ''} (tried {tried})",
            host=name,
            hint=f"--remote-python PATH{' in the image' if image else ''}, or python=PATH in the hostfile",
        )
    if CAUSE in stderr:
        cause, _, hint = stderr.rpartition(CAUSE)[2].partition("\n")
        hint = hint.partition(HINT)[2].partition("\n")[0]
        return ContainerFailed(plain(cause, _LONGEST_LINE), host=name, hint=plain(hint, _LONGEST_LINE))
    if status == _TIMED_OUT:
        cause = "its agent's program did not arrive within the lease"
        return AgentFailed(
            cause, host=name, hint="a longer --lease: the way to that host is slow, or was cut"
        )
    # Most shells say on stderr what is wrong; a login script may say it on stdout.
    lines = (stderr or noise.decode("utf-8", "replace").strip()).splitlines() or [broken or "nothing"]
    if image is not None:
        # Docker's last line says where its help is.
        lines = [line for line in lines if line.strip() and not line.startswith(("Run '", "See '"))] or lines
    last = plain(lines[-1], _LONGEST_LINE)
    ended = f"status {status}" if status is not None else "no status"
    by_hand = f"on that host, docker (or podman) run --rm {image} python3 --version"
    if image is None:
        by_hand = f"ssh {name} python3 --version; if that works, --remote-python with another Python"
    return AgentFailed(
        f"its agent did not start ({ended}); the host printed: {last}",
        host=name,
        hint=_hint(last, by_hand),
    )


def _hint(cause: str, otherwise: str) -> str:
    """Return the hint for a known cause, else `otherwise`."""
    return next((hint for text, hint in _HINTS.items() if text in cause), otherwise)
