"""The form in which output is kept in a job's directory: items with a checksum, in segments; docs/architecture.md, "Output that is kept"."""

import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from hvlaunch.console.recent import Origin
from hvlaunch.job import ConsoleOptions

__all__ = [
    "Kind",
    "Position",
    "Stored",
    "head_of",
    "items",
    "options_of",
    "pack",
    "segment_path",
    "segments",
]

Kind = Literal["head", "stdout", "stderr", "stdout ended", "stderr ended", "said", "shown", "placed"]
"""What an item is: what holds for its segment from the start; what a rank wrote, or that it will write no more there; a
message of hvlaunch's own; a report; where ranks are."""

_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEADER = struct.Struct("<IIdqiBB")
"""CRC-32 of all that follows; bytes behind this header; seconds since 1970; frame; rank; kind; bytes of the session's name."""
_NOBODY = -1
_MOST = 1 << 30
_SEGMENT = re.compile(r"output\.([0-9]{6,9})")
_READ_SIZE = 1 << 18


class Stored(NamedTuple):
    """One item. `rank` is None for what is not a worker's, `origin` for what did not come in a frame."""

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
    """What a segment's head has of a job's options, for those who look on."""
    ranks = options.ranks
    return {
        "prefix": options.prefix,
        "color": options.color,
        "merge": options.merge,
        "hidden": options.hidden,
        "ranks": None if ranks is None else [[part.start, part.stop, part.step] for part in ranks],
    }


def options_of(head: Mapping[str, Any]) -> ConsoleOptions:
    """From what head_of() has made."""
    ranks = head["ranks"]
    return ConsoleOptions(
        prefix=head["prefix"],
        color=head["color"],
        merge=head["merge"],
        hidden=tuple(head["hidden"]),
        ranks=None if ranks is None else tuple(range(*part) for part in ranks),
    )


def pack(item: Stored) -> bytes:
    """The item as it is in a segment."""
    name, frame = item.origin or ("", _NOBODY)
    session = os.fsencode(name)
    rank = _NOBODY if item.rank is None else item.rank
    size = len(session) + len(item.data)
    header = _HEADER.pack(0, size, item.time, frame, rank, _KINDS.index(item.kind), len(session))
    whole = b"".join((header[4:], session, item.data))
    return zlib.crc32(whole).to_bytes(4, "little") + whole


def items(segment: int, offset: int = 0) -> Iterator[tuple[Stored, int]]:
    """The whole items of an open segment from `offset` on, each with the offset behind it, as far as they are there now."""
    kept, start = b"", offset
    while data := os.pread(segment, max(_READ_SIZE, _missing(kept)), start + len(kept)):
        kept += data
        used = 0
        while (found := _unpack(kept, used)) is not None:
            item, size = found
            used += size
            yield item, start + used
        kept, start = kept[used:], start + used


def _missing(data: bytes) -> int:
    """How many bytes the item lacks that `data` begins with; 0 where that is not known."""
    if len(data) < _HEADER.size:
        return 0
    size = _HEADER.unpack_from(data)[1]
    return _HEADER.size + size - len(data) if size <= _MOST else 0


def _unpack(data: bytes, start: int) -> tuple[Stored, int] | None:
    """The item at `start` of `data`, and its size; None where there is no whole one."""
    if len(data) - start < _HEADER.size:
        return None
    checksum, size, time, frame, rank, kind, name_size = _HEADER.unpack_from(data, start)
    end = start + _HEADER.size + size
    if end > len(data) or name_size > size or kind >= len(_KINDS):
        return None
    if zlib.crc32(memoryview(data)[start + 4 : end]) != checksum:
        return None
    middle = start + _HEADER.size + name_size
    origin = (os.fsdecode(data[start + _HEADER.size : middle]), frame) if name_size else None
    item = Stored(time, _KINDS[kind], data[middle:end], None if rank == _NOBODY else rank, origin)
    return item, end - start


def segments(directory: Path) -> list[int]:
    """The numbers of the segments that are there, in order. Raises OSError."""
    names = os.listdir(directory)  # noqa: PTH208 (names alone)
    return sorted(int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name)))


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"output.{number:06}"
