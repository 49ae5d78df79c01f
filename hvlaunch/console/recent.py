"""The newest output of a job in memory, for viewers to come."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from hvlaunch.console.lines import Stream

__all__ = ["Kept", "Origin", "OutputKeeper", "Place", "Recent"]

Origin = tuple[str, int]
"""A session's name, and the number of a frame in it."""
Place = tuple[str, int]
"""A rank's host and local_rank."""

_MOST = 1 << 18
_ITEM = 256
"""Bytes of an item's overhead."""


class OutputKeeper(Protocol):
    """Stores output and messages of hvlaunch."""

    def learn_places(self, places: Mapping[int, Place]) -> None: ...

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None: ...

    def end_stream(self, rank: int, stream: Stream, origin: Origin | None = None) -> None: ...

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...


class Kept(Protocol):
    """An item for a store."""

    @property
    def keep(self) -> Callable[[OutputKeeper], None] | None: ...


class Recent:
    """The newest items, up to a limit of memory. For one thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Kept, int]] = deque()
        self._size = 0

    def add(self, item: Kept, size: int) -> None:
        """Add an item with its size in bytes, and drop the oldest."""
        size += _ITEM
        self._kept.append((item, size))
        self._size += size
        # The size counts, not the number: an item may be a byte or 64 KiB.
        while self._size > _MOST:
            self._size -= self._kept.popleft()[1]

    def pour_into(self, keeper: OutputKeeper) -> None:
        """Store the items."""
        for item, _ in self._kept:
            if item.keep is not None:
                item.keep(keeper)
