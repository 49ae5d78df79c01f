"""Reads what a job's output store has, and what comes to it meanwhile."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.console.stored import Position, Stored, items, segment_path, segments

__all__ = ["STREAMS", "StoreReader", "from_where", "newest_lines"]

STREAMS = ("stdout", "stderr")
_ALWAYS = ("head", "placed")


class StoreReader:
    """From a position on, or, without one, from the oldest item that is kept."""

    def __init__(self, directory: Path, position: Position | None = None) -> None:
        self._directory = directory
        self._file = -1
        self.position = position or Position(0, 0)
        """Behind what was read last."""
        self.has_missed = False
        """Whether something was removed before it could be read."""

    def read(self) -> Iterator[Stored]:
        """What is there now and was not read yet."""
        while self._file >= 0 or self._open_next(self.position.segment):
            next_one = self._next_segment()  # first: what came to this segment before is read below
            for item, offset in items(self._file, self.position.offset):
                self.position = Position(self.position.segment, offset)
                yield item
            if next_one is None:
                return
            self.close()
            self.position = Position(next_one, 0)

    def close(self) -> None:
        """May be called again; read() goes on where it was."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _numbers(self) -> list[int]:
        with suppress(OSError):  # the directory is gone
            return segments(self._directory)
        return []

    def _next_segment(self) -> int | None:
        return next((number for number in self._numbers() if number > self.position.segment), None)

    def _open_next(self, first: int) -> bool:
        """Open the segment with this number, or the oldest after it."""
        for number in self._numbers():
            if number < first:
                continue
            with suppress(FileNotFoundError):
                path = segment_path(self._directory, number)
                self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if number != self.position.segment:
                    self.has_missed = self.position != (0, 0) or number > 1
                    self.position = Position(number, 0)
                return True
        return False

    def seek_time(self, since: float) -> None:
        """Go to the newest segment that begins before this time (seconds since 1970), or to the oldest."""
        for number in self._numbers():
            if (head := self._head_of(number)) is not None and head.time <= since:
                self.position = Position(number, 0)

    def seek_newest(self, count: int) -> None:
        """Go to the beginning of the newest segments, so many."""
        for number in self._numbers()[-count:][:1]:
            self.position = Position(number, 0)

    def head(self) -> Mapping[str, Any] | None:
        """What the newest segment begins with; None where there is none."""
        for number in reversed(self._numbers()):
            if (head := self._head_of(number)) is not None:
                found: Mapping[str, Any] = json.loads(head.data)
                return found
        return None

    def _head_of(self, number: int) -> Stored | None:
        with suppress(OSError):
            file = os.open(segment_path(self._directory, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return next((item for item, _ in items(file)), None)
            finally:
                os.close(file)
        return None


def newest_lines(found: Iterable[Stored], count: int, is_shown: Callable[[Stored], bool]) -> tuple[int, int]:
    """Where the last `count` lines begin: behind so many items, and behind so many lines of the next that has any."""
    sizes: deque[tuple[int, int]] = deque()
    total = early = 0
    for index, item in enumerate(found, 1):
        lines = _lines(item) if is_shown(item) else 0
        if lines:
            sizes.append((index, lines))
            total += lines
        while sizes and total - sizes[0][1] >= count:
            early, lines = sizes.popleft()
            total -= lines
    return early, max(0, total - count)


def _lines(item: Stored) -> int:
    return item.data.count(b"\n") if item.kind in STREAMS else item.kind in ("said", "shown")


def from_where(found: Iterable[Stored], is_early: Callable[[Stored], bool]) -> Iterator[Stored]:
    """The items without the early ones, which are the first; lines that begin in these are left out as a whole.

    What says where ranks are is left in.
    """
    unfinished: set[tuple[int | None, str]] = set()
    has_begun = False
    for item in found:
        has_begun = has_begun or not is_early(item)
        key = item.rank, item.kind.removesuffix(" ended")
        if item.kind in _ALWAYS:
            yield item
        elif item.kind not in STREAMS:
            unfinished.discard(key)
            if has_begun:
                yield item
        elif not has_begun:
            (unfinished.discard if item.data.endswith(b"\n") else unfinished.add)(key)
        elif key not in unfinished:
            yield item
        elif b"\n" in item.data:
            unfinished.remove(key)
            yield item._replace(data=item.data.partition(b"\n")[2])
