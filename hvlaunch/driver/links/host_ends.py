"""How a host's end is told: as an error with its cause, and what to try."""

from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.agent.wire.shapes import plain
from hvlaunch.driver.program.agent_program import NO_PYTHON
from hvlaunch.errors import AgentFailed, ChannelGarbled, HostError, HostLost, NoPython, ProtocolBroken

__all__ = ["LONGEST_LINE", "broken", "garbled", "lost", "never_began"]

LONGEST_LINE = 500
"""Of what a host says, where it is quoted."""
_NOT_FOUND = 127
_TIMED_OUT = 128 + 14
"""By SIGALRM, of the timer on its command line."""
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
    """A host that was ready, and is gone."""
    return HostLost(f"lost: {cause}", host=host, hint=_hint(cause, _LOST_HINT))


def broken(host: str, error: BadFrame) -> ProtocolBroken:
    """A host whose agent said what it may not."""
    return ProtocolBroken(
        f"lost: it sent what no agent of hvlaunch's sends: {error}",
        host=host,
        hint="whether that host, and what else of yours runs there, can be trusted",
    )


def garbled(host: str) -> ChannelGarbled:
    """A host on which something wrote between the agent's bytes."""
    return ChannelGarbled(
        "lost: another program on it wrote into the middle of its agent's messages",
        host=host,
        hint="start-up files of that host must not leave programs running that print",
    )


def never_began(name: str, status: int | None, stderr: str, broken: str | None, noise: bytes) -> HostError:
    """A host whose agent has said nothing; `noise` is what else was printed there."""
    if status == _NOT_FOUND and NO_PYTHON in stderr:
        tried = plain(stderr.partition(NO_PYTHON)[2].partition("\n")[0].strip(), LONGEST_LINE)
        return NoPython(
            f"no Python >= 3.8 was found (tried {tried})",
            host=name,
            hint="--remote-python PATH, or python=PATH in the hostfile",
        )
    if status == _TIMED_OUT:
        cause = "its agent's program did not arrive within the lease"
        return AgentFailed(
            cause, host=name, hint="a longer --lease: the way to that host is slow, or was cut"
        )
    lines = (stderr or noise.decode("utf-8", "replace").strip()).splitlines() or [broken or "nothing"]
    last = plain(lines[-1], LONGEST_LINE)
    ended = f"status {status}" if status is not None else "no status"
    by_hand = f"ssh {name} python3 --version; if that works, --remote-python with another Python"
    return AgentFailed(
        f"its agent did not start ({ended}); the host printed: {last}",
        host=name,
        hint=_hint(last, by_hand),
    )


def _hint(cause: str, otherwise: str) -> str:
    """What to try, where the cause is one that we know."""
    return next((hint for text, hint in _HINTS.items() if text in cause), otherwise)
