"""Equal lines of several ranks, printed once (--merge)."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

from hvlaunch.console.lines import Stream

__all__ = ["Merged", "Merger"]

_WINDOW = 0.2
_MOST_LINES = 10_000
_MOST_BYTES = 8 << 20

Merged = tuple[tuple[int, ...], Stream, bytes]
"""Ranks, stream, and the lines that all of these ranks wrote."""


class _Line:
    __slots__ = ("born", "number", "place", "ranks", "stream", "taken", "text")

    def __init__(self, rank: int, stream: Stream, text: bytes, *, number: int, born: float) -> None:
        self.ranks = {rank}
        self.stream = stream
        self.text = text
        # Position in the order of arrival.
        self.number = number
        self.born = born
        # Position in the order of printing.
        self.place = 0.0
        self.taken = False


class Merger:
    """Holds each line briefly, until other ranks have written it too.

    A rank joins the first equal line after its own last line. A new line is placed as early as the rank's order
    allows, and so the rank's next lines can still join lines of ranks that are ahead. The order within each
    rank is kept. `now` is in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._queue: list[_Line] = []
        self._arrived: deque[_Line] = deque()
        self._alike: dict[tuple[Stream, bytes], list[_Line]] = {}
        self._last: dict[int, _Line] = {}
        self._running: dict[Stream, set[int]] = {"stdout": set(), "stderr": set()}
        self._number = 0
        self._size = 0

    @property
    def deadline(self) -> float | None:
        """Time when lines are due, or None if no line waits."""
        return None if self.oldest is None else self.oldest + _WINDOW

    @property
    def oldest(self) -> float | None:
        """Arrival time of the oldest waiting line."""
        while self._arrived and self._arrived[0].taken:
            self._arrived.popleft()
        return self._arrived[0].born if self._arrived else None

    def expect(self, ranks: Iterable[int]) -> None:
        """Learn of ranks that will write: a line that all of them have written is due at once."""
        ranks = list(ranks)
        for running in self._running.values():
            running.update(ranks)

    def ended(self, rank: int, stream: Stream) -> None:
        """Record that the rank's stream has ended."""
        self._running[stream].discard(rank)

    def add(self, rank: int, stream: Stream, lines: bytes, now: float) -> None:
        """Accept lines of a rank, each with its newline."""
        for text in lines.splitlines(keepends=True):
            last = self._last.get(rank)
            after = last.place if last is not None and not last.taken else -1.0
            alike = self._alike.setdefault((stream, text), [])
            index = bisect_right(alike, after, key=_place)
            if index < len(alike):
                line = alike[index]
                line.ranks.add(rank)
            else:
                line = _Line(rank, stream, text, number=self._number, born=now)
                self._number += 1
                self._size += len(text)
                self._insert(line, after)
                alike.insert(bisect_right(alike, line.place, key=_place), line)
            self._last[rank] = line

    def take_lines(self, now: float, *, everything: bool = False) -> list[Merged]:
        """Return the lines that are due, in order."""
        if everything or len(self._queue) > _MOST_LINES or self._size > _MOST_BYTES:
            count = len(self._queue)
        else:
            count = max(self._due(now), self._complete())
        lines = self._queue[:count]
        del self._queue[:count]
        for line in lines:
            self._forget(line)
        return list(_joined(lines))

    def _insert(self, line: _Line, after: float) -> None:
        """Place the line right after the position `after`."""
        index = bisect_right(self._queue, after, key=_place)
        before = self._queue[index - 1].place if index else -1.0
        behind = self._queue[index].place if index < len(self._queue) else before + 2.0
        line.place = (before + behind) / 2
        self._queue.insert(index, line)
        # Halving the distance many times leaves no float in between, so all lines get new numbers.
        if not before < line.place < behind:
            for place, other in enumerate(self._queue):
                other.place = float(place)
        self._arrived.append(line)

    def _due(self, now: float) -> int:
        """Return how many lines leave, including all lines that have waited long enough."""
        if self.deadline is None or self.deadline > now:
            return 0
        due = (line.place for line in self._arrived if not line.taken and line.born + _WINDOW <= now)
        return bisect_right(self._queue, max(due), key=_place)

    def _complete(self) -> int:
        """Return how many of the first lines have been written by all ranks."""
        for index, line in enumerate(self._queue):
            running = self._running[line.stream]
            # The length first: comparing the sets is slow with many ranks.
            if len(line.ranks) < len(running) or not line.ranks >= running:
                return index
        return len(self._queue)

    def _forget(self, line: _Line) -> None:
        line.taken = True
        self._size -= len(line.text)
        key = (line.stream, line.text)
        del self._alike[key][0]
        if not self._alike[key]:
            del self._alike[key]


def _place(line: _Line) -> float:
    return line.place


def _joined(lines: list[_Line]) -> Iterator[Merged]:
    """Yield runs of lines with equal ranks; adjacent lines of single ranks are in order of arrival."""
    ordered: list[_Line] = []
    for alone, group in groupby(lines, lambda line: len(line.ranks) == 1):
        run = list(group)
        # Lines of single ranks did not merge, so their arrival decides.
        ordered += sorted(run, key=lambda line: line.number) if alone else run
    for (ranks, stream), group in groupby(ordered, lambda line: (tuple(sorted(line.ranks)), line.stream)):
        yield ranks, stream, b"".join(line.text for line in group)
