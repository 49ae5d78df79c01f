"""Stored output of a job: a log of items, in segments. OutputStore writes it and removes the oldest segments; StoreReader reads it."""

import json
import os
import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from hvlaunch.console.lines import Key, Stream
from hvlaunch.console.notes import LostOutput
from hvlaunch.console.recent import Origin, Place
from hvlaunch.job import ConsoleOptions
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.record import follow, pack_record, write_whole_at

__all__ = [
    "MOST_KEPT",
    "STREAMS",
    "Kind",
    "OutputStore",
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


_BAR_PAUSE = 1.0
"""Seconds between two stored states of a bar."""

_State = tuple[bytes, Origin | None]


class _BarStates:
    """Selects states of progress bars for the output store: one per second, because all states would fill it.

    The newest state of each stream is held back until the last stored state is old enough, or other output
    comes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[Key, _State] = {}
        self._next: dict[Key, float] = {}
        """Earliest time for the next stored state."""
        self._begun: set[Key] = set()
        """Streams whose last stored state is incomplete."""

    def add(self, key: Key, data: bytes, origin: Origin | None) -> list[_State]:
        """Return the states to store now: held-back states and this one. due() and release() return the others
        later.
        """
        before = self._held.pop(key, None)
        if b"\n" in data or not (data.startswith(b"\r") or data.endswith(b"\r")):
            return self._kept(key, [(data, origin)] if before is None else [before, (data, origin)])
        if before is not None:
            data = _newest(before[0] + data, is_begun=key in self._begun)
        now = self._clock()
        # Too early: hold it back, and let a newer state replace it.
        if now < self._next.get(key, 0.0):
            self._held[key] = data, origin
            return []
        self._next[key] = now + _BAR_PAUSE
        return self._kept(key, [(data, origin)])

    def release(self, key: Key) -> _State | None:
        """Return the held-back state of a stream that has ended."""
        self._begun.discard(key)
        return self._held.pop(key, None)

    def due(self) -> list[tuple[Key, _State]]:
        """Return the states that have been held back long enough."""
        if not self._held:
            return []
        now = self._clock()
        keys = [key for key in self._held if now >= self._next[key]]
        self._next.update(dict.fromkeys(keys, now + _BAR_PAUSE))
        return [(key, state) for key in keys for state in self._kept(key, [self._held.pop(key)])]

    @property
    def deadline(self) -> float | None:
        """Time of the next due state."""
        return min((self._next[key] for key in self._held), default=None)

    def _kept(self, key: Key, states: list[_State]) -> list[_State]:
        (self._begun.discard if states[-1][0].endswith((b"\r", b"\n")) else self._begun.add)(key)
        return states


def _newest(states: bytes, *, is_begun: bool) -> bytes:
    """Drop states that later states overwrite: keep the last complete state and the bytes after it.

    Chunks may end inside a state. If the stored part of a state `is_begun`, its end is kept too.
    """
    first, last = states.find(b"\r"), states.rfind(b"\r")
    begin = max(first, states.rfind(b"\r", 0, last))
    return (states[:first] if is_begun else b"") + states[begin:]


MOST_KEPT = 64 << 20
"""Bytes of a job's newest output in the store."""
_SEGMENTS = 8
_PAUSE = 1.0
"""Seconds after a failed write during which output is dropped: otherwise each small gap would be reported."""
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputStore:
    """Appends to the segments in a job's directory. For one thread; written output outlives the process.

    Of a progress bar, a state per second is stored, and the last.

    The newest MOST_KEPT bytes stay, sometimes an eighth less.
    """

    def __init__(
        self,
        directory: Path,
        head: Mapping[str, object] | None = None,
        *,
        most: int = MOST_KEPT,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue behind existing output; a torn item is removed. Raises OSError.

        `head` has facts about the job for viewers.
        """
        self.seen: dict[str, int] = {}
        """The newest stored frame of each session."""
        self._directory = directory
        self._head = dict(head or {})
        self._places: dict[int, Place] = {}
        self._most = most // _SEGMENTS
        self._wall, self._clock = wall, clock
        # Without it, progress bars would push lines out of the 64 MiB.
        self._states = _BarStates(clock)
        self._waiting: list[bytes] = []
        self._newest: dict[str, int] = {}
        """Like `seen`, for items not written yet."""
        self._lost = LostOutput(directory)
        self._retry_at = 0.0
        self._is_urgent = False
        self._segments = segments(directory)
        self._file, self._size = -1, 0
        if self._segments:
            self._go_on()
        else:
            self._begin_segment()
        # A copy that never changes: any thread may ask has().
        self._before = dict(self.seen)

    def learn_places(self, places: Mapping[int, Place]) -> None:
        """Record the hosts and local ranks of new ranks."""
        self._places.update(places)
        self._add("placed", json.dumps(places).encode())

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None:
        """Store output of a rank. Frames stored already are skipped."""
        if self.has(origin):
            return
        for kept, newest in self._states.add((rank, stream), data, origin):
            self._add(stream, kept, rank, newest)

    def end_stream(self, rank: int, stream: Stream, origin: Origin | None = None) -> None:
        """Record the end of a stream."""
        if self.has(origin):
            return
        held = self._states.release((rank, stream))
        if held is not None:
            self._add(stream, held[0], rank, held[1])
        self._add("stdout ended" if stream == "stdout" else "stderr ended", b"", rank, origin)

    def has(self, origin: Origin | None) -> bool:
        """True if an earlier store has this frame. For any thread."""
        return origin is not None and origin[1] <= self._before.get(origin[0], -1)

    def say(self, text: str) -> None:
        """Store a message of hvlaunch."""
        self._is_urgent = True
        self._add("said", text.encode(errors="backslashreplace"))

    def show(self, text: str) -> None:
        """Store a report."""
        self._is_urgent = True
        self._add("shown", text.encode(errors="backslashreplace"))

    def write(self) -> None:
        """Write the added items. Raises OSError: they are lost then, and viewers hear how much."""
        for (rank, stream), (data, origin) in self._states.due():
            self._add(stream, data, rank, origin)
        if not self._waiting:
            return
        data, self._waiting = b"".join(self._waiting), []
        self.seen.update(self._newest)
        self._newest.clear()
        is_urgent, self._is_urgent = self._is_urgent, False
        if self._lost.size:
            # Messages and reports are always tried.
            if self._clock() < self._retry_at and not is_urgent:
                self._lost.add(len(data))
                # The gap is announced before the output behind it.
                return
            data = pack(Stored(self._wall(), "said", self._lost.text.encode())) + data
        try:
            self._append_somehow(data)
        except OSError as error:
            self._lost.add(len(data), error.errno or 0)
            self._retry_at = self._clock() + _PAUSE
            raise
        self._lost.forget()
        if self._size >= self._most:
            # If this fails, the old segment grows beyond its size.
            with suppress(OSError):
                self._begin_segment()

    @property
    def deadline(self) -> float | None:
        """The time of the next write, even without further items."""
        return self._states.deadline

    def tails(self, size: int) -> dict[int, bytes]:
        """Return the last bytes of each rank's stderr in the newest two segments. Raises OSError."""
        tails: dict[int, bytes] = {}
        ended: set[int] = set()
        for number in self._segments[-2:]:
            for item in _all_items(segment_path(self._directory, number)):
                if item.rank is None:
                    continue
                if item.kind == "stderr ended":
                    ended.add(item.rank)
                elif item.kind == "stderr":
                    before = b"" if item.rank in ended else tails.get(item.rank, b"")
                    ended.discard(item.rank)
                    tails[item.rank] = (before + item.data)[-size:]
        return tails

    def close(self) -> None:
        """May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _add(self, kind: Kind, data: bytes, rank: int | None = None, origin: Origin | None = None) -> None:
        self._waiting.append(pack(Stored(self._wall(), kind, data, rank, origin)))
        if origin is not None:
            self._newest[origin[0]] = origin[1]

    def _append_somehow(self, data: bytes) -> None:
        """Append, if need be at the expense of the oldest segment. Raises OSError."""
        try:
            self._append(data)
        except OSError:
            if len(self._segments) == 1:
                raise
            segment_path(self._directory, self._segments.pop(0)).unlink(missing_ok=True)
            self._append(data)

    def _append(self, data: bytes) -> None:
        write_whole_at(self._file, data, self._size)
        self._size += len(data)

    def _go_on(self) -> None:
        """Load the newest two segments: the head of the newest may be torn."""
        for number in self._segments[-2:]:
            self.close()
            self._file, self._size = os.open(segment_path(self._directory, number), _FILE, 0o600), 0
            for item, offset in items(self._file):
                self._size = offset
                if item.kind == "head":
                    self._learn(**json.loads(item.data))
                elif item.kind == "placed":
                    self._learn(json.loads(item.data), {})
                elif item.origin is not None:
                    self.seen[item.origin[0]] = item.origin[1]
        # A torn item of a killed driver would hide everything behind it.
        os.ftruncate(self._file, self._size)
        if not self._size:
            self._append(self._packed_head())

    def _learn(self, places: Mapping[str, list[Any]], seen: Mapping[str, int], **_: object) -> None:
        self._places.update({int(rank): (host, local_rank) for rank, (host, local_rank) in places.items()})
        self.seen.update(seen)

    def _begin_segment(self) -> None:
        """Begin the next segment; on an error, the old one goes on. Raises OSError."""
        number = self._segments[-1] + 1 if self._segments else 1
        path, head = segment_path(self._directory, number), self._packed_head()
        file = os.open(path, _FILE, 0o600)
        try:
            write_whole_at(file, head, 0)
        except OSError:
            os.close(file)
            # An empty segment would count as the newest.
            path.unlink()
            raise
        self.close()
        self._file, self._size = file, len(head)
        self._segments.append(number)
        # The new segment is there first: a reader always finds a newest one.
        while len(self._segments) > _SEGMENTS:
            segment_path(self._directory, self._segments.pop(0)).unlink(missing_ok=True)

    def _packed_head(self) -> bytes:
        head = {**self._head, "places": self._places, "seen": self.seen}
        return pack(Stored(self._wall(), "head", json.dumps(head).encode()))


def _all_items(path: Path) -> Iterator[Stored]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield from (item for item, _ in items(file))
    finally:
        os.close(file)
