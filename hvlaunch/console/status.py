"""What hvlaunch waits for."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["AskStatus", "OnStatus", "Status", "counted"]


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
