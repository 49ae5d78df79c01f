"""A file, pipe or terminal that is written without a buffer."""

import os
import select
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["RawFile", "same_place"]

_MOST_PARTS = 32
"""More parts than this are small ones, and are joined: that is cheaper, and the kernel has a limit (IOV_MAX)."""


class RawFile:
    """Writes to the descriptor of `file` where it has one, else to `file`.

    The file's own buffer is not used: bytes left in it would fail again, with a traceback, when the interpreter ends.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        file.flush()
        try:
            self.descriptor: int | None = file.fileno()
        except OSError:  # io.UnsupportedOperation: in memory
            self.descriptor = None

    @property
    def is_terminal(self) -> bool:
        return self.descriptor is not None and os.isatty(self.descriptor)

    @property
    def is_pipe(self) -> bool:
        return self.descriptor is not None and stat.S_ISFIFO(os.fstat(self.descriptor).st_mode)

    def height(self) -> int:
        """Rows of the terminal; 24 where it does not tell."""
        try:
            return os.get_terminal_size(self.descriptor or 0).lines or 24
        except OSError:
            return 24

    def write(self, *parts: bytes) -> None:
        """Write all of `parts`; blocks while the reader does not take it. Raises OSError."""
        if self.descriptor is None:
            self._file.write(b"".join(parts))
            self._file.flush()
            return
        if len(parts) > _MOST_PARTS:
            parts = (b"".join(parts),)
        rest = [memoryview(part) for part in parts if part]
        while rest:
            try:
                written = os.writev(self.descriptor, rest)
            except BlockingIOError:  # noqa: PERF203 - another process on this terminal made it non-blocking
                poll = select.poll()
                poll.register(self.descriptor, select.POLLOUT)
                poll.poll()
            else:
                rest = list(_without(rest, written))


def _without(parts: list[memoryview], size: int) -> Iterator[memoryview]:
    """What is left of `parts` behind their first `size` bytes."""
    for part in parts:
        if size < len(part):
            yield part[size:]
        size = max(0, size - len(part))


def same_place(first: RawFile, second: RawFile) -> bool:
    """Whether both end in the same terminal, pipe or file."""
    if first.descriptor is None or second.descriptor is None:
        return first._file is second._file  # noqa: SLF001 - two of one class
    return os.path.sameopenfile(first.descriptor, second.descriptor)
