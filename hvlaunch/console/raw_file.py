"""A file, pipe or terminal that is written without a buffer, and without waiting for who reads it."""

import os
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

__all__ = ["RawFile", "new_bell", "same_place"]

_MOST_PARTS = 32
"""More parts than this are small ones, and are joined: that is cheaper, and the kernel has a limit (IOV_MAX)."""
_PIPE_SIZE = 1 << 20
"""Bytes that a pipe shall hold which has once been full. Most hold 64 KiB, a quarter of a page, and to wait for its reader four
times costs more than all else that printing does."""
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
"""fcntl(2), of Linux alone; elsewhere they are errors."""


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
        self._writes_to: int | None = None
        """Where a write never blocks; -1 where there is no such descriptor. None before the first."""
        self._has_been_full = False

    @property
    def is_terminal(self) -> bool:
        return self.descriptor is not None and os.isatty(self.descriptor)

    @property
    def is_pipe(self) -> bool:
        return self.descriptor is not None and stat.S_ISFIFO(os.fstat(self.descriptor).st_mode)

    @property
    def waits_at(self) -> int | None:
        """The descriptor that becomes writable, where write() has left something."""
        return self.descriptor if self._writes_to == -1 else self._writes_to

    def close(self) -> None:
        """Close what was opened here: the file itself stays open."""
        if self._writes_to is not None and self._writes_to not in (-1, self.descriptor):
            os.close(self._writes_to)
            self._writes_to = None

    def height(self) -> int:
        """Rows of the terminal; 24 where it does not tell."""
        try:
            return os.get_terminal_size(self.descriptor or 0).lines or 24
        except OSError:
            return 24

    def takes_some(self) -> bool:
        """Whether a write would take anything now. That is not asked of who has always taken all."""
        descriptor = self.waits_at
        if descriptor is None or not (self._has_been_full or self._writes_to == -1):
            return True
        return _takes_some(descriptor)

    def write(self, parts: "Sequence[bytes | memoryview]") -> list[memoryview]:
        """Write what the reader takes at once; what is left. Raises OSError."""
        if self.descriptor is None:
            self._file.write(b"".join(parts))
            self._file.flush()
            return []
        if self._writes_to is None:
            self._writes_to = _never_blocking(self.descriptor)
        rest = [memoryview(part) for part in parts if part]
        if len(rest) > _MOST_PARTS:
            rest = [memoryview(b"".join(rest))]
        while rest:
            try:
                if self._writes_to >= 0:
                    written = os.writev(self._writes_to, rest)
                elif _takes_some(self.descriptor):
                    written = os.write(self.descriptor, rest[0][: select.PIPE_BUF])
                else:
                    break
                rest = list(_without(rest, written))
            except BlockingIOError:
                if self._has_been_full:
                    break
                self._has_been_full = True
                _widen(self._writes_to)
        return rest


def _never_blocking(descriptor: int) -> int:
    """A descriptor for the same file, whose writes don't wait for a reader; -1 where there is none.

    A pipe or terminal is opened once more: O_NONBLOCK of the descriptor itself would be that of other processes, too.
    """
    if not (
        os.isatty(descriptor) or stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)
    ):
        return descriptor
    try:
        return os.open(
            f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except OSError:  # a socket, another user's terminal, a pipe whose reader is gone, no /proc
        return -1


def _widen(descriptor: int) -> None:
    """Let a pipe hold more, where the kernel can and this user may."""
    from fcntl import fcntl  # noqa: PLC0415 (few jobs print so much)

    with suppress(OSError):
        if fcntl(descriptor, _F_GETPIPE_SZ) < _PIPE_SIZE:
            fcntl(descriptor, _F_SETPIPE_SZ, _PIPE_SIZE)


def _takes_some(descriptor: int) -> bool:
    """Whether PIPE_BUF bytes are taken without waiting, as far as that is known."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _without(parts: list[memoryview], size: int) -> Iterator[memoryview]:
    """What is left of `parts` behind their first `size` bytes."""
    for part in parts:
        if size < len(part):
            yield part[size:]
        size = max(0, size - len(part))


def new_bell() -> tuple[int, int] | None:
    """A pipe whose one end wakes who waits at the other; None where no descriptor is left."""
    try:
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def same_place(first: RawFile, second: RawFile) -> bool:
    """Whether both end in the same terminal, pipe or file."""
    if first.descriptor is None or second.descriptor is None:
        return first._file is second._file  # noqa: SLF001 - two of one class
    return os.path.sameopenfile(first.descriptor, second.descriptor)
