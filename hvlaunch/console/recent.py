"""The newest output of a job, for those who will look at it only from now on."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from hvlaunch.console.lines import Stream

__all__ = ["Keeper", "Kept", "Origin", "Place", "Recent"]

Origin = tuple[str, int]
"""A session's name, and the number in it of the frame that something came in."""
Place = tuple[str, int]
"""A rank's host and local_rank."""

_MOST = 1 << 18
_ITEM = 256
"""Bytes that an item costs besides its own."""


class Keeper(Protocol):
    """What keeps output, and hvlaunch's own words."""

    def learn_places(self, places: Mapping[int, Place]) -> None: ...

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None: ...

    def end_stream(self, rank: int, stream: Stream, origin: Origin | None = None) -> None: ...

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...


class Kept(Protocol):
    """One thing that can be kept."""

    @property
    def keep(self) -> Callable[[Keeper], None] | None: ...


class Recent:
    """Keeps what was newest, in memory, until somebody wants it. For one thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Kept, int]] = deque()
        self._size = 0

    def add(self, item: Kept, size: int) -> None:
        """The newest. `size` is what it takes, in bytes."""
        size += _ITEM
        self._kept.append((item, size))
        self._size += size
        while self._size > _MOST:
            self._size -= self._kept.popleft()[1]

    def pour_into(self, keeper: Keeper) -> None:
        """Give `keeper` all that is kept."""
        for item, _ in self._kept:
            if item.keep is not None:
                item.keep(keeper)
