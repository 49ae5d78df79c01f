"""Where the output of a job is kept that nobody looks at, for those who will: stored.py has the form."""

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
from hvlaunch.record.log import write_whole_at

__all__ = ["MOST_KEPT", "OutputStore"]

MOST_KEPT = 64 << 20
"""Bytes of output that are kept of a job, the newest."""
_SEGMENTS = 8
_PAUSE = 1.0
"""Seconds after a write that has failed in which output is dropped: else each small gap would be told."""
_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputStore:
    """Appends to the segments in a job's directory. For one thread; what it has written outlives the process.

    Of a progress bar a state is kept each second, and the last one.

    The newest MOST_KEPT bytes are kept, and an eighth of that less at times.
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
        """Go on behind what is there already; an item that is not whole is removed. Raises OSError.

        `head` is what viewers need to know of the job.
        """
        self.seen: dict[str, int] = {}
        """The newest frame of each session whose output is kept here."""
        self._directory = directory
        self._head = dict(head or {})
        self._places: dict[int, Place] = {}
        self._most = most // _SEGMENTS
        self._wall, self._clock = wall, clock
        self._states = BarStates(clock)
        self._waiting: list[bytes] = []
        self._newest: dict[str, int] = {}
        """As `seen`, of what waits."""
        self._lost = LostOutput(directory)
        self._retry_at = 0.0
        self._is_urgent = False
        self._segments = segments(directory)
        self._file, self._size = -1, 0
        if self._segments:
            self._go_on()
        else:
            self._begin_segment()
        self._before = dict(self.seen)

    def learn_places(self, places: Mapping[int, Place]) -> None:
        """Ranks will write, on these hosts and as these local ranks."""
        self._places.update(places)
        self._add("placed", json.dumps(places).encode())

    def output(self, rank: int, stream: Stream, data: bytes, origin: Origin | None = None) -> None:
        """A rank wrote this. What came in a frame that is kept already is skipped, as everywhere."""
        if self.has(origin):
            return
        for kept, newest in self._states.add((rank, stream), data, origin):
            self._add(stream, kept, rank, newest)

    def end_stream(self, rank: int, stream: Stream, origin: Origin | None = None) -> None:
        """Nothing more comes of this stream."""
        if self.has(origin):
            return
        held = self._states.release((rank, stream))
        if held is not None:
            self._add(stream, held[0], rank, held[1])
        self._add("stdout ended" if stream == "stdout" else "stderr ended", b"", rank, origin)

    def has(self, origin: Origin | None) -> bool:
        """Whether it was kept here before this store was opened. For any thread."""
        return origin is not None and origin[1] <= self._before.get(origin[0], -1)

    def say(self, text: str) -> None:
        """A message of hvlaunch's own."""
        self._is_urgent = True
        self._add("said", text.encode(errors="backslashreplace"))

    def show(self, text: str) -> None:
        """A report, as it is."""
        self._is_urgent = True
        self._add("shown", text.encode(errors="backslashreplace"))

    def write(self) -> None:
        """Write what was added since. Raises OSError: that is lost then, and those who read here are told how much."""
        for (rank, stream), (data, origin) in self._states.due():
            self._add(stream, data, rank, origin)
        if not self._waiting:
            return
        data, self._waiting = b"".join(self._waiting), []
        self.seen.update(self._newest)
        self._newest.clear()
        is_urgent, self._is_urgent = self._is_urgent, False
        if self._lost.size:
            if self._clock() < self._retry_at and not is_urgent:
                self._lost.add(len(data))
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
            with suppress(OSError):  # then this one grows on
                self._begin_segment()

    @property
    def deadline(self) -> float | None:
        """When to write, even if nothing is added until then."""
        return self._states.deadline

    def tails(self, size: int) -> dict[int, bytes]:
        """The last bytes of each rank's stderr that are kept in the newest two segments. Raises OSError."""
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
        """Where there is no room, the oldest that is kept makes some. Raises OSError."""
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
        """Learn from the newest two segments: the head of the newest may not be whole."""
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
        os.ftruncate(self._file, self._size)
        if not self._size:
            self._append(self._packed_head())

    def _learn(self, places: Mapping[str, list[Any]], seen: Mapping[str, int], **_: object) -> None:
        self._places.update({int(rank): (host, local_rank) for rank, (host, local_rank) in places.items()})
        self.seen.update(seen)

    def _begin_segment(self) -> None:
        """Begin the next segment; where that can't be, the last one goes on. Raises OSError."""
        number = self._segments[-1] + 1 if self._segments else 1
        path, head = segment_path(self._directory, number), self._packed_head()
        file = os.open(path, _FILE, 0o600)
        try:
            write_whole_at(file, head, 0)
        except OSError:
            os.close(file)
            path.unlink()
            raise
        self.close()
        self._file, self._size = file, len(head)
        self._segments.append(number)
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
