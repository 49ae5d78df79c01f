"""What a display shows, on its way to readers who may take their time."""

from collections.abc import Callable, Sequence

from hvlaunch.console.display import Display
from hvlaunch.console.raw_file import RawFile

__all__ = ["Outlet"]


class Outlet:
    """Writes a display's pages, as far as they are taken at once. `failed` is called with what can't be written.

    While a page is not all taken, no further page is made: what the display gets meanwhile waits in it.
    """

    def __init__(self, display: Display, failed: Callable[[RawFile, OSError], None]) -> None:
        self.display = display
        self._failed = failed
        self._page: list[tuple[RawFile, Sequence[bytes | memoryview]]] = []
        self._is_dropped = False
        self._broken: set[RawFile] = set()
        self._owed: list[Callable[[], None]] = []
        """To be called when the page is written."""
        self._next: list[Callable[[], None]] = []
        """To be called when the page after it is."""

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called when what the display has now is written."""
        self._next.append(call)

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
                rest = self._write_to(file, parts)
                has_written = has_written or sum(map(len, rest)) < sum(map(len, parts))
                if rest:
                    self._page[0] = file, rest
                    return has_written
                del self._page[0]
            self._settle()
            self._owed, self._next = self._next, []
            self._page.extend(self.display.page(now))
            if not self._page:
                self._settle()
                return has_written

    def _settle(self) -> None:
        owed, self._owed = self._owed, []
        for call in owed:
            call()

    def _write_to(
        self, file: RawFile, parts: "Sequence[bytes | memoryview]"
    ) -> "Sequence[bytes | memoryview]":
        if file in self._broken or self._is_dropped:
            return []
        try:
            return file.write(parts)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                self._broken.add(file)
            self._failed(file, error)
            return []

    def drop(self, now: float) -> None:
        """Forget what waits, and what comes: nobody takes it."""
        self._is_dropped = True
        self.write(now)
