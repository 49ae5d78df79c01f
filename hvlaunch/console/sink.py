"""A file, pipe or terminal that takes all the bytes it is given."""

import os
import select
from typing import BinaryIO

__all__ = ["Sink", "same_place"]


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

    def write(self, data: bytes) -> None:
        """Write all of `data`; blocks while the reader does not take it. Raises OSError."""
        if self.descriptor is None:
            self._file.write(data)
            self._file.flush()
            return
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except BlockingIOError:  # noqa: PERF203 - another process on this terminal made it non-blocking
                poll = select.poll()
                poll.register(self.descriptor, select.POLLOUT)
                poll.poll()


def same_place(one: Sink, other: Sink) -> bool:
    """Whether both end in the same terminal, pipe or file."""
    if one.descriptor is None or other.descriptor is None:
        return one._file is other._file  # noqa: SLF001 - two of one class
    return os.path.sameopenfile(one.descriptor, other.descriptor)
