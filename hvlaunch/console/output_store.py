"""Stores the output of a job in its directory, for later viewers; stored.py has the format."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.console.bars import BarStates
from hvlaunch.console.lines import Stream
from hvlaunch.console.notes import LostOutput
from hvlaunch.console.recent import Origin, Place
from hvlaunch.console.stored import Kind, Stored, items, pack, segment_path, segments
from hvlaunch.record import write_whole_at

__all__ = ["MOST_KEPT", "OutputStore"]

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
        self._states = BarStates(clock)
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
