"""A small file in the job's directory: up to which frame each agent was told that we have them, and what was printed."""

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvlaunch.console.lines import Stream

__all__ = ["SEEN", "Seen", "SeenFile", "SeenFrames"]

SEEN = "seen"
_FIELDS = 4
"""Of a link, 8 bytes each: those of Seen, and one that is free, so that no link lies in two pages."""
_PLACES: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_PAGE = mmap.ALLOCATIONGRANULARITY
_PER_PAGE = _PAGE // (8 * _FIELDS)


def _no_need() -> None:
    pass


class Seen(NamedTuple):
    """Of one link: numbers of frames in the lasting stream."""

    told: int = 0
    """The agent may have forgotten all up to this one."""
    stdout: int = 0
    """The last one with output that was printed."""
    stderr: int = 0


class SeenFile:
    """For any thread. A number is written before anybody relies on it: what was written outlives the process.

    It is memory that the file shares: a call of the kernel for each line that is printed would be a tenth of what printing costs.
    Where there is no room, nothing is kept; that a disk is full is found out by the journal.
    """

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        """`is_synced`: what agents are told outlives the machine too. Raises OSError."""
        self._is_synced = is_synced
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        """With what lets the disk have it."""

    def of(self, link: int) -> "SeenFrames":
        number, place = divmod(link, _PER_PAGE)
        with self._lock:
            if number not in self._pages:
                self._pages[number] = self._page(number)
            page, sync = self._pages[number]
            return SeenFrames(page[_FIELDS * place : _FIELDS * (place + 1)], sync)

    def _page(self, number: int) -> tuple[memoryview, Callable[[], object]]:
        offset = number * _PAGE
        try:
            size = os.fstat(self._fd).st_size
            while (
                size < offset + _PAGE
            ):  # with its blocks: a page without one could not be written where the disk is full
                size += os.pwrite(self._fd, bytes(offset + _PAGE - size), size)
            shared = mmap.mmap(self._fd, _PAGE, offset=offset)
            return memoryview(shared).cast("Q"), shared.flush if self._is_synced else _no_need
        except OSError:
            return memoryview(bytearray(_PAGE)).cast("Q"), _no_need

    def close(self) -> None:
        os.close(self._fd)


class SeenFrames:
    """Those of one link. tell() is for any thread, all else for the printer's."""

    def __init__(self, numbers: memoryview, sync: Callable[[], object] = _no_need) -> None:
        self._numbers = numbers
        self._sync = sync
        self._telling = threading.Lock()

    @property
    def last(self) -> Seen:
        return Seen(*self._numbers[: len(Seen._fields)])

    def tell(self, number: int) -> None:
        """The agent is about to be told that it need not keep any frame up to this one."""
        with self._telling:
            if number > self._numbers[0]:
                self._numbers[0] = number
                with suppress(OSError):  # that a disk fails is found out by the journal
                    self._sync()

    def print(self, stream: Stream, number: int) -> None:
        """The output of this frame is printed: it was, or will be in the next moment."""
        self._set(_PLACES[stream], number)

    def take_back(self, stream: Stream, number: int) -> None:
        """The output of this frame, and what came after it, was not printed."""
        place = _PLACES[stream]
        self._numbers[place] = min(self._numbers[place], number - 1)

    def _set(self, place: int, number: int) -> None:
        self._numbers[place] = max(self._numbers[place], number)
