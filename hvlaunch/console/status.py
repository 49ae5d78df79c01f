"""What hvlaunch waits for."""

from typing import NamedTuple

__all__ = ["Status"]


class Status(NamedTuple):
    """What hvlaunch waits for."""

    text: str
    """A line, perhaps with more lines."""
    done: int = 0
    """Hosts that are connected."""
    of: int = 0
    """Hosts that are to be; 0 where nobody knows."""
