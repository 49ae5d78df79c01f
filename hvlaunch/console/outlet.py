"""What a display shows, on its way to readers who may take their time."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from hvlaunch.console.display import Display
from hvlaunch.console.lines import Stream
from hvlaunch.console.raw_file import RawFile
from hvlaunch.console.recent import Keeper, Origin

__all__ = ["BATCH", "Outlet", "Output"]

BATCH = 1 << 18
"""Bytes of output for one page, and at most one item more."""


class Output(NamedTuple):
    """What a rank wrote; `done(len(data))` is called when that is written.

    `note(True)` is called right before it is written, `note(False)` where that was not taken at once: who is killed in between, or
    has to wait for a reader, leaves the truth behind.
    """

    rank: int
    stream: Stream
    data: bytes
    done: Callable[[int], None]
    origin: Origin | None = None
    note: Callable[[bool], None] | None = None

    def keep(self, keeper: Keeper) -> None:
        """Give it to who keeps output."""
        if self.data:
            keeper.output(self.rank, self.stream, self.data, self.origin)


class Outlet:
    """Writes a display's pages, as far as they are taken at once. `failed` is called with what can't be written.

    While a page is not all taken, no further page is made. What is put meanwhile waits, in its order, as it came: as
    lines of pages it would take several times the memory.
    """

    def __init__(self, display: Display, failed: Callable[[RawFile, OSError], None]) -> None:
        self.display = display
        self._failed = failed
        self._waiting: deque[Output | Callable[[float], None]] = deque()
        self._page: list[tuple[RawFile, Sequence[bytes | memoryview]]] = []
        self._owed: deque[tuple[float, list[Output]]] = deque()
        """What the display got, and when: for this page, or to merge it."""
        self._is_noted = False
        """Whether what this page has is on record as written."""
        self._is_dropped = False
        self._broken: set[RawFile] = set()

    def put(self, item: Output | Callable[[float], None]) -> None:
        """Show output, or do to the display what is called with the time then; with the next write(), in its turn."""
        self._waiting.append(item)

    @property
    def waits_at(self) -> int | None:
        """The descriptor that something waits for; None where nothing does."""
        return self._page[0][0].waits_at if self._page else None

    @property
    def waits_for(self) -> str:
        """The name of the file that something waits for."""
        return self._page[0][0].name

    @property
    def deadline(self) -> float | None:
        """When to write, even if the display gets nothing until then; None while something waits."""
        return None if self._page else self.display.deadline

    def write(self, now: float) -> bool:
        """Write what is taken; whether that was anything."""
        has_written = False
        while True:
            while self._page:
                file, parts = self._page[0]
                if not self._is_over(file) and not file.takes_some():
                    return has_written  # without a moment in which it is on record as written
                self._note(is_printed=True)
                rest = self._write_to(file, parts)
                has_written = has_written or sum(map(len, rest)) < sum(map(len, parts))
                if rest:
                    self._note(is_printed=False)
                    self._page[0] = file, rest
                    return has_written
                del self._page[0]
            self._settle()
            self._feed(now)
            self._page.extend(self.display.page(now))
            if not self._page and not self._waiting:
                self._settle()
                return has_written

    def _note(self, *, is_printed: bool) -> None:
        if is_printed != self._is_noted:
            self._is_noted = is_printed
            written = self._written()
            for output in written if is_printed else reversed(written):
                if output.note is not None:
                    output.note(is_printed)

    def _settle(self) -> None:
        """What was written is done with; how an unfinished line begins is noted."""
        self._is_noted = False
        self.display.note_unfinished()
        for output in self._written():
            output.done(len(output.data))
        for _ in range(self._paged()):
            self._owed.popleft()

    def _paged(self) -> int:
        """How much of what the display got is in no page to come: not what waits to be merged."""
        oldest = None if self._is_dropped else self.display.oldest
        return len(self._owed) if oldest is None else sum(given < oldest for given, _ in self._owed)

    def _written(self) -> list[Output]:
        return [output for _, outputs in islice(self._owed, self._paged()) for output in outputs]

    def _feed(self, now: float) -> None:
        """Give the display what waits, as much as one page shall have."""
        size = 0
        given: list[Output] = []
        while self._waiting and size < BATCH:
            item = self._waiting.popleft()
            if isinstance(item, Output):
                if item.data:
                    self.display.output((item.rank, item.stream), item.data, now)
                given.append(item)
                size += len(item.data)
            else:
                item(now)
        if given:
            self._owed.append((now, given))

    def _write_to(
        self, file: RawFile, parts: "Sequence[bytes | memoryview]"
    ) -> "Sequence[bytes | memoryview]":
        if self._is_over(file):
            return []
        try:
            return file.write(parts)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                self._broken.add(file)
            self._failed(file, error)
            return []

    def _is_over(self, file: RawFile) -> bool:
        """Whether nothing is written there any more."""
        return file in self._broken or self._is_dropped

    def drop(self, now: float) -> None:
        """Forget what waits, and what comes: nobody takes it."""
        self._is_dropped = True
        self.write(now)
