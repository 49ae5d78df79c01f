"""A file, pipe or terminal that takes all the bytes it is given."""

import os
import select
import stat
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["Sink", "same_place"]

_MOST_PARTS = 32
"""More, and so smaller, parts are joined: that is cheaper then, and there is a limit (IOV_MAX)."""


class Sink:
    """Writes to the descriptor of `file` where it has one, else to `file`.

    Going past the file's own buffer leaves nothing in it that fails again, with a traceback, when the interpreter ends.
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


def same_place(one: Sink, other: Sink) -> bool:
    """Whether both end in the same terminal, pipe or file."""
    if one.descriptor is None or other.descriptor is None:
        return one._file is other._file  # noqa: SLF001 - two of one class
    return os.path.sameopenfile(one.descriptor, other.descriptor)
