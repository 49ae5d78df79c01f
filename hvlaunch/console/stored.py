"""Stored output of a job and its readers: a log of items, in segments; the oldest segments are removed."""

import json
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from hvlaunch.console.recent import Origin
from hvlaunch.job import ConsoleOptions
from hvlaunch.record import follow, pack_record

__all__ = [
    "STREAMS",
    "Kind",
    "Position",
    "StoreReader",
    "Stored",
    "from_where",
    "head_of",
    "items",
    "newest_lines",
    "options_of",
    "pack",
    "segment_path",
    "segments",
]

Kind = Literal["head", "stdout", "stderr", "stdout ended", "stderr ended", "said", "shown", "placed"]
"""The facts at the start of a segment; output of a rank, or the end of its stream; a message of hvlaunch; a report; places of ranks."""

STREAMS = ("stdout", "stderr")
_ALWAYS = ("head", "placed")
_KINDS: tuple[Kind, ...] = get_args(Kind)
_ITEM = struct.Struct("<dqiBB")
"""Seconds since 1970, frame, rank, kind, bytes of the session's name; the name and the data follow."""
_NOBODY = -1
_SEGMENT = re.compile(r"output\.([0-9]{6,9})")


class Stored(NamedTuple):
    """A stored item. `rank` is None for items without a worker, `origin` for items without a frame."""

    time: float
    """Seconds since 1970."""
    kind: Kind
    data: bytes = b""
    rank: int | None = None
    origin: Origin | None = None


class Position(NamedTuple):
    """A place between two items: the number of a segment, and bytes from its start."""

    segment: int
    offset: int


def head_of(options: ConsoleOptions) -> Mapping[str, object]:
    """Return the job's options for a segment's head, for viewers."""
    ranks = options.ranks
    return {
        "prefix": options.prefix,
        "color": options.color,
        "merge": options.merge,
        "hidden": options.hidden,
        "ranks": None if ranks is None else [[part.start, part.stop, part.step] for part in ranks],
        **({"labels": options.labels} if options.labels else {}),
    }


def options_of(head: Mapping[str, Any]) -> ConsoleOptions:
    """Return the options from a head of head_of()."""
    ranks = head["ranks"]
    return ConsoleOptions(
        prefix=head["prefix"],
        color=head["color"],
        merge=head["merge"],
        hidden=tuple(head["hidden"]),
        ranks=None if ranks is None else tuple(range(*part) for part in ranks),
        labels=tuple(head.get("labels", ())),
    )


def pack(item: Stored) -> bytes:
    """Return the item in its form on disk."""
    name, frame = item.origin or ("", _NOBODY)
    session = os.fsencode(name)
    # The form has fixed fields: -1 stands for a missing number.
    rank = _NOBODY if item.rank is None else item.rank
    head = _ITEM.pack(item.time, frame, rank, _KINDS.index(item.kind), len(session))
    # Records of output continue no checksum, so that a reader can begin at any of them.
    return pack_record((head, session, item.data))[0]


def items(segment: int, offset: int = 0) -> Iterator[tuple[Stored, int]]:
    """Yield the whole items of an open segment from `offset` on, each with the offset behind, as far as written now."""
    for body, end in follow(segment, offset):
        time, frame, rank, kind, name_size = _ITEM.unpack_from(body)
        name_end = _ITEM.size + name_size
        origin = (os.fsdecode(body[_ITEM.size : name_end]), frame) if name_size else None
        yield Stored(time, _KINDS[kind], body[name_end:], None if rank == _NOBODY else rank, origin), end


def segments(directory: Path) -> list[int]:
    """Return the numbers of existing segments, in order. Raises OSError."""
    names = os.listdir(directory)  # noqa: PTH208 (names alone)
    return sorted(int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name)))


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"output.{number:06}"


class StoreReader:
    """Reads a job's stored output while it grows, from a position or from the oldest item."""

    def __init__(self, directory: Path, position: Position | None = None) -> None:
        self._directory = directory
        self._file = -1
        self.position = position or Position(0, 0)
        """Behind the newest item read."""
        self.has_missed = False
        """True if output was removed before this reader came."""

    def read(self) -> Iterator[Stored]:
        """Yield the unread items, as far as written now."""
        while self._file >= 0 or self._open_next(self.position.segment):
            # Before the items: what was written to this segment before the next one began is then read below.
            next_segment = self._next_segment()
            # The position moves with each item: a viewer may stop anywhere.
            for item, offset in items(self._file, self.position.offset):
                self.position = Position(self.position.segment, offset)
                yield item
            if next_segment is None:
                return
            self.close()
            self.position = Position(next_segment, 0)

    def close(self) -> None:
        """Close the segment; read() continues at the same position. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _numbers(self) -> list[int]:
        # The directory may be removed meanwhile.
        with suppress(OSError):
            return segments(self._directory)
        return []

    def _next_segment(self) -> int | None:
        return next((number for number in self._numbers() if number > self.position.segment), None)

    def _open_next(self, first: int) -> bool:
        """Open the segment with this number, or the oldest after it."""
        for number in self._numbers():
            if number < first:
                continue
            # The oldest segment may be removed just now.
            with suppress(FileNotFoundError):
                self._file = _open(segment_path(self._directory, number))
                if number != self.position.segment:
                    self.has_missed = self.position != (0, 0) or number > 1
                    self.position = Position(number, 0)
                return True
        return False

    def seek_time(self, since: float) -> None:
        """Move to the newest segment with a start before this time (seconds since 1970), or to the oldest."""
        for number in self._numbers():
            if (head := self._head_of(number)) is not None and head.time <= since:
                self.position = Position(number, 0)

    def seek_newest(self, count: int) -> None:
        """Move to the beginning of the newest `count` segments."""
        for number in self._numbers()[-count:][:1]:
            self.position = Position(number, 0)

    def head(self) -> Mapping[str, Any] | None:
        """Return the facts at the start of the newest segment; None without a segment."""
        for number in reversed(self._numbers()):
            if (item := self._head_of(number)) is not None:
                facts: Mapping[str, Any] = json.loads(item.data)
                return facts
        return None

    def _head_of(self, number: int) -> Stored | None:
        with suppress(OSError):
            file = _open(segment_path(self._directory, number))
            try:
                return next((item for item, _ in items(file)), None)
            finally:
                os.close(file)
        return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def newest_lines(stored: Iterable[Stored], count: int, is_shown: Callable[[Stored], bool]) -> tuple[int, int]:
    """Return the start of the last `count` lines: the number of items before, and of lines in the next item with lines."""
    sizes: deque[tuple[int, int]] = deque()
    total = early = 0
    for index, item in enumerate(stored, 1):
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


def from_where(stored: Iterable[Stored], is_early: Callable[[Stored], bool]) -> Iterator[Stored]:
    """Yield the items behind the early ones at the beginning, without the rest of early lines.

    Items with the places of ranks are always yielded.
    """
    unfinished: set[tuple[int | None, str]] = set()
    has_begun = False
    for item in stored:
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
