"""The credit that one host's agent gets for output that was dealt with, in large portions."""

from collections.abc import Callable
from threading import Lock

from hvlaunch.agent.frames import FRAME_COST

__all__ = ["Credit"]


class Credit:
    """For any thread: the printer's, and the link's own for what functions return. `give` sends so much to the agent."""

    def __init__(self, window: int, give: Callable[[int], None]) -> None:
        self._portion = window // 4
        self._give = give
        self._lock = Lock()
        self._due = 0

    def add(self, size: int) -> None:
        """A frame with so many bytes of output was dealt with."""
        with self._lock:
            self._due += size + FRAME_COST
            if self._due >= self._portion:
                self._give(self._due)
                self._due = 0
