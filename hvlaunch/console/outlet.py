"""An outlet: writes a display's pages to readers that may be slow."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from hvlaunch.console.display import Display
from hvlaunch.console.lines import Stream
from hvlaunch.console.raw_file import RawFile
from hvlaunch.console.recent import Origin, OutputKeeper

__all__ = ["BATCH", "Outlet", "Output"]

BATCH = 1 << 18
"""Maximum bytes of output on one page, not counting the last item."""


class Output(NamedTuple):
    """Output of a rank; `done(len(data))` is called when it is written.

    `note(True)` is called just before the write, and `note(False)` if the reader did not take everything at
    once. A process that is killed in between, or waits for a reader, leaves a true record.
    """

    rank: int
    stream: Stream
    data: bytes
    done: Callable[[int], None]
    origin: Origin | None = None
    note: Callable[[bool], None] | None = None

    def keep(self, keeper: OutputKeeper) -> None:
        """Pass the output to a store."""
        if self.data:
            keeper.output(self.rank, self.stream, self.data, self.origin)


class Outlet:
    """Writes a display's pages, as far as readers take them at once. `failed` receives errors of writing.

    The outlet makes no page while an earlier page is unfinished. Items put meanwhile wait in their original
    form: as lines of pages they would take several times the memory.
    """

    def __init__(self, display: Display, failed: Callable[[RawFile, OSError], None]) -> None:
        self.display = display
        self._failed = failed
        self._waiting: deque[Output | Callable[[float], None]] = deque()
        self._page: list[tuple[RawFile, Sequence[bytes | memoryview]]] = []
        self._owed: deque[tuple[float, list[Output]]] = deque()
        """Output given to the display, with the time: it is on this page, or waits to be merged."""
        self._is_noted = False
        """True if the record says that this page's output is written."""
        self._is_dropped = False
        self._broken: set[RawFile] = set()

    def put(self, item: Output | Callable[[float], None]) -> None:
        """Queue output, or a call for the display with the time of the next write()."""
        self._waiting.append(item)

    @property
    def waits_at(self) -> int | None:
        """Return the descriptor of the file that blocks the page, or None."""
        return self._page[0][0].waits_at if self._page else None

    @property
    def waits_for(self) -> str:
        """Return the name of the file that blocks the page."""
        return self._page[0][0].name

    @property
    def deadline(self) -> float | None:
        """Return the time of the next write without new output; None while a page is unfinished."""
        return None if self._page else self.display.deadline

    def write(self, now: float) -> bool:
        """Write as much as readers take; return True if that was anything."""
        has_written = False
        while True:
            while self._page:
                file, parts = self._page[0]
                if not self._is_over(file) and not file.takes_some():
                    # Return before _note(): the record must never claim output that is still to be written.
                    return has_written
                self._note(is_printed=True)
                unwritten = self._write_to(file, parts)
                has_written = has_written or sum(map(len, unwritten)) < sum(map(len, parts))
                if unwritten:
                    self._note(is_printed=False)
                    self._page[0] = file, unwritten
                    return has_written
                del self._page[0]
            self._settle()
            self._feed(now)
            # A new page only after the last one was taken: waiting items take less memory than lines of pages.
            self._page.extend(self.display.page(now))
            if not self._page and not self._waiting:
                self._settle()
                return has_written

    def _note(self, *, is_printed: bool) -> None:
        if is_printed != self._is_noted:
            self._is_noted = is_printed
            written = self._written()
            # Taken back in reverse, so that sizes on record shrink step by step.
            for output in written if is_printed else reversed(written):
                if output.note is not None:
                    output.note(is_printed)

    def _settle(self) -> None:
        """Acknowledge written output, and note the beginnings of unfinished lines."""
        self._is_noted = False
        self.display.note_unfinished()
        for output in self._written():
            output.done(len(output.data))
        for _ in range(self._paged()):
            self._owed.popleft()

    def _paged(self) -> int:
        """Return how many of the owed items are on pages already; the others wait to be merged."""
        oldest = None if self._is_dropped else self.display.oldest
        return len(self._owed) if oldest is None else sum(given < oldest for given, _ in self._owed)

    def _written(self) -> list[Output]:
        return [output for _, outputs in islice(self._owed, self._paged()) for output in outputs]

    def _feed(self, now: float) -> None:
        """Give the display one page of the waiting items."""
        size = 0
        given: list[Output] = []
        # A bounded page: its reader may take long, and merging waits for the page.
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
            # A broken pipe stays broken; other errors, such as a full disk, may pass.
            if isinstance(error, BrokenPipeError):
                self._broken.add(file)
            self._failed(file, error)
            return []

    def _is_over(self, file: RawFile) -> bool:
        """Return True if nothing is written to `file` any more."""
        return file in self._broken or self._is_dropped

    def drop(self, now: float) -> None:
        """Forget waiting and future output: its reader takes nothing."""
        self._is_dropped = True
        self.write(now)
