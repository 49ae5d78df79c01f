"""Acknowledged and printed frames of each agent, in shared memory with a small file in the job's directory."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvlaunch.console.lines import Stream
from hvlaunch.record.shared import PAGE, SharedFile

__all__ = ["FRAMES", "FrameNumbers", "FrameRecord", "FrameRecords"]

FRAMES = "seen"
_FIELDS = 4
"""Numbers of 8 bytes per link: three of FrameNumbers and a spare, so no link spans two pages."""
_LINKS_PER_PAGE = PAGE // (8 * _FIELDS)
_INDEXES: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def _no_need() -> None:
    pass


class FrameNumbers(NamedTuple):
    """Frame numbers of a link in its lasting stream."""

    acked: int = 0
    """The agent may have forgotten every frame up to here."""
    stdout: int = 0
    """The last frame whose output was printed."""
    stderr: int = 0


class FrameRecords:
    """The numbers of all links. For any thread.

    A number is written before its acknowledgement is sent, and outlives the process. On a full disk numbers are lost: the
    journal fails too, and tells the user.
    """

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        """With `is_synced`, acknowledgements outlive the machine too. Raises OSError."""
        self._is_synced = is_synced
        self._file = SharedFile(path)
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        """Each with its sync function."""

    def of_link(self, link: int) -> "FrameRecord":
        number, index = divmod(link, _LINKS_PER_PAGE)
        with self._lock:
            if number not in self._pages:
                self._pages[number] = self._page(number)
            page, sync = self._pages[number]
            # Each link has its own slice: threads of different links need no common lock.
            return FrameRecord(page[_FIELDS * index : _FIELDS * (index + 1)], sync)

    def _page(self, number: int) -> tuple[memoryview, Callable[[], object]]:
        try:
            # Shared memory, since a system call for each printed line is a tenth of the cost of printing.
            shared = self._file.map(number * PAGE, PAGE)
            return memoryview(shared).cast("Q"), shared.flush if self._is_synced else _no_need
        # Private memory instead: the job goes on without a record.
        except OSError:
            return memoryview(bytearray(PAGE)).cast("Q"), _no_need

    def close(self) -> None:
        self._file.close()


class FrameRecord:
    """The numbers of a link. acknowledge() is for any thread, the other methods for the printer's."""

    def __init__(self, memory: memoryview, sync: Callable[[], object] = _no_need) -> None:
        self._memory = memory
        self._sync = sync
        self._lock = threading.Lock()

    @property
    def numbers(self) -> FrameNumbers:
        return FrameNumbers(*self._memory[: len(FrameNumbers._fields)])

    def acknowledge(self, number: int) -> None:
        """Record an acknowledgement, right before the agent gets it and forgets the frames."""
        with self._lock:
            if number > self._memory[0]:
                self._memory[0] = number
                with suppress(OSError):  # the journal reports a disk that fails
                    self._sync()

    def record_printed(self, stream: Stream, number: int) -> None:
        """Record the output of this frame as printed: it is, or will be in the next moment."""
        self._set(_INDEXES[stream], number)

    def take_back(self, stream: Stream, number: int) -> None:
        """Record the output of this frame, and of later ones, as not printed."""
        index = _INDEXES[stream]
        self._memory[index] = min(self._memory[index], number - 1)

    def _set(self, index: int, number: int) -> None:
        self._memory[index] = max(self._memory[index], number)
