"""The status line of a job's start, and times in words."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["AskStatus", "OnStatus", "Status", "count", "counted", "duration"]


class Status(NamedTuple):
    """What hvlaunch waits for."""

    text: str
    """A line, perhaps with more lines."""
    done: int = 0
    """Hosts that are connected."""
    of: int = 0
    """Hosts that are to be; 0 where nobody knows."""


AskStatus: TypeAlias = Callable[[], Status]
"""Asked again and again: a status tells how long it has lasted."""
OnStatus: TypeAlias = Callable[[AskStatus | None], None]
"""Gets what is waited for from now on; None: nothing any more."""


def counted(done: int, of: int, failed: int, seconds: float) -> str:
    """How many hosts are connected, in words."""
    lost = f", {failed} failed" if failed else ""
    return f"{done}/{of}{lost}, {seconds:.0f} s"


_MINUTE, _HOUR = 60, 3600


def duration(seconds: float) -> str:
    """`0.04 s`, `12.4 s`, `3 min 12 s`, `2 h 14 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
