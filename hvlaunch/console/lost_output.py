"""How much of a job's output could not be kept, as long as nobody was told."""

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["LostOutput", "text_of"]

_NAME = "lost"
_NUMBERS = struct.Struct("<QQ")
"""Bytes, and the number of the error."""


class LostOutput:
    """In memory that a file of the job's directory shares: it takes no room where there is none left, and outlives the driver.

    Where that file can't be made, it is known to this process alone.
    """

    def __init__(self, directory: Path) -> None:
        """What is on record already, of a driver before us."""
        self._shared: mmap.mmap | None = None
        self.size, self._error = _read(directory)
        with suppress(OSError):
            file = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                page = _NUMBERS.pack(self.size, self._error).ljust(mmap.PAGESIZE, b"\0")
                if os.pwrite(file, page, 0) == len(
                    page
                ):  # with its block: memory without one could not be written
                    self._shared = mmap.mmap(file, len(page))
            finally:
                os.close(file)

    @property
    def text(self) -> str:
        """What users are told."""
        return _text(self.size, self._error)

    def add(self, size: int, error: int | None = None) -> None:
        """So many bytes more; `error` is why, if that is another than before."""
        self._note(self.size + size, self._error if error is None else error)

    def forget(self) -> None:
        """It was told."""
        if self.size:
            self._note(0, 0)

    def _note(self, size: int, error: int) -> None:
        self.size, self._error = size, error
        if self._shared is not None:
            self._shared[: _NUMBERS.size] = _NUMBERS.pack(size, error)


def text_of(directory: Path) -> str | None:
    """What is on record in this directory; None where nothing is."""
    size, error = _read(directory)
    return _text(size, error) if size else None


def _text(size: int, error: int) -> str:
    return f"{size} bytes of output are lost: {os.strerror(error).lower()}"


def _read(directory: Path) -> tuple[int, int]:
    with suppress(OSError, struct.error):
        file = os.open(directory / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size, error = _NUMBERS.unpack(os.read(file, _NUMBERS.size))
            return int(size), int(error)
        finally:
            os.close(file)
    return 0, 0
