"""The newest output of a job, for those who will look at it only from now on."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from hvlaunch.console.lines import Stream

__all__ = ["Keeper", "Origin", "Place", "Recent"]

Origin = tuple[str, int]
"""A session's name, and the number in it of the frame that something came in."""
Place = tuple[str, int]
"""A rank's host and local_rank."""

_MOST = 1 << 18
_ITEM = 256
"""Bytes that an item costs besides its own."""


class Keeper(Protocol):
    """What keeps output, and hvlaunch's own words."""

    def place(self, places: Mapping[int, Place]) -> None: ...

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None: ...

    def end(self, rank: int, stream: Stream, origin: Origin | None = None) -> None: ...

    def say(self, text: str) -> None: ...

    def show(self, text: str) -> None: ...


class Recent:
    """Keeps what was newest, in memory, until somebody wants it. For one thread."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._kept: deque[tuple[Callable[[Keeper], None], int]] = deque()
        self._size = 0

    def place(self, places: Mapping[int, Place]) -> None:
        self._places.update(places)

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None:
        self._keep(lambda keeper: keeper.output(rank, stream, data, origin), len(data))

    def end(self, rank: int, stream: Stream, origin: Origin | None = None) -> None:
        self._keep(lambda keeper: keeper.end(rank, stream, origin), 0)

    def say(self, text: str) -> None:
        self._keep(lambda keeper: keeper.say(text), len(text))

    def show(self, text: str) -> None:
        self._keep(lambda keeper: keeper.show(text), len(text))

    def pour_into(self, keeper: Keeper) -> None:
        """Give `keeper` all that is kept."""
        keeper.place(self._places)
        for put, _ in self._kept:
            put(keeper)

    def _keep(self, put: Callable[[Keeper], None], size: int) -> None:
        self._kept.append((put, size + _ITEM))
        self._size += size + _ITEM
        while self._size > _MOST:
            self._size -= self._kept.popleft()[1]
