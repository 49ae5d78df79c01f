"""A file, pipe or terminal, written without a buffer and without waiting for its reader."""

import os
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

__all__ = ["RawFile", "new_bell", "same_place"]

_MOST_PARTS = 32
"""A write of more parts joins them. Many parts are small, joining is cheaper, and the kernel has a limit
(IOV_MAX).
"""
_PIPE_SIZE = 1 << 20
"""Capacity of a pipe after it was full once.

A pipe holds 64 KiB by default, a quarter of a page; waiting for its reader four times costs more than printing.
"""
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
"""fcntl(2) of Linux; other systems report an error."""


class RawFile:
    """Writes to the descriptor of `file`, or to `file` itself if it has none.

    The file's buffer is not used: bytes left in it would fail again, with a traceback, when the interpreter
    ends.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        file.flush()
        try:
            self.descriptor: int | None = file.fileno()
        # A file in memory raises io.UnsupportedOperation, which is an OSError.
        except OSError:
            self.descriptor = None
        self._writes_to: int | None = None
        """Descriptor for writes that never block; -1 if there is none, None before the first write."""
        self._has_been_full = False

    @property
    def is_terminal(self) -> bool:
        return self.descriptor is not None and os.isatty(self.descriptor)

    @property
    def is_pipe(self) -> bool:
        return self.descriptor is not None and stat.S_ISFIFO(os.fstat(self.descriptor).st_mode)

    @property
    def waits_at(self) -> int | None:
        """Return the descriptor that becomes writable after an incomplete write()."""
        return self.descriptor if self._writes_to == -1 else self._writes_to

    def close(self) -> None:
        """Close the second descriptor. The file itself stays open."""
        if self._writes_to is not None and self._writes_to not in (-1, self.descriptor):
            os.close(self._writes_to)
            self._writes_to = None

    def height(self) -> int:
        """Return the rows of the terminal, or 24 if unknown."""
        try:
            return os.get_terminal_size(self.descriptor or 0).lines or 24
        except OSError:
            return 24

    def takes_some(self) -> bool:
        """Return True if a write would take anything now. A file that has never been full is not polled."""
        descriptor = self.waits_at
        if descriptor is None or not (self._has_been_full or self._writes_to == -1):
            return True
        return _takes_some(descriptor)

    def write(self, parts: "Sequence[bytes | memoryview]") -> list[memoryview]:
        """Write as much as the reader takes at once; return the rest. Raises OSError."""
        if self.descriptor is None:
            self._file.write(b"".join(parts))
            self._file.flush()
            return []
        if self._writes_to is None:
            self._writes_to = _never_blocking(self.descriptor)
        unwritten = [memoryview(part) for part in parts if part]
        if len(unwritten) > _MOST_PARTS:
            unwritten = [memoryview(b"".join(unwritten))]
        while unwritten:
            try:
                if self._writes_to >= 0:
                    written = os.writev(self._writes_to, unwritten)
                # A blocking descriptor: POSIX promises that a pipe with room takes PIPE_BUF bytes at once.
                elif _takes_some(self.descriptor):
                    written = os.write(self.descriptor, unwritten[0][: select.PIPE_BUF])
                else:
                    break
                unwritten = list(_without(unwritten, written))
            except BlockingIOError:
                if self._has_been_full:
                    break
                self._has_been_full = True
                # Only after the pipe was full once: most jobs never fill it.
                _widen(self._writes_to)
        return unwritten


def _never_blocking(descriptor: int) -> int:
    """Return a descriptor of the same file for writes that never block, or -1.

    A pipe or terminal is opened a second time, because O_NONBLOCK on the original would also apply to other
    processes.
    """
    if not (
        os.isatty(descriptor) or stat.S_IFMT(os.fstat(descriptor).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)
    ):
        return descriptor
    try:
        return os.open(
            f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    # A socket, another user's terminal, a pipe whose reader is gone, or no /proc.
    except OSError:
        return -1


def _widen(descriptor: int) -> None:
    """Enlarge a pipe, if the kernel and the user's limits allow it."""
    from fcntl import fcntl  # noqa: PLC0415 (few jobs print so much)

    with suppress(OSError):
        if fcntl(descriptor, _F_GETPIPE_SZ) < _PIPE_SIZE:
            fcntl(descriptor, _F_SETPIPE_SZ, _PIPE_SIZE)


def _takes_some(descriptor: int) -> bool:
    """Return True if a write of PIPE_BUF bytes would not block, as far as poll() tells."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def _without(parts: list[memoryview], size: int) -> Iterator[memoryview]:
    """Yield `parts` without their first `size` bytes."""
    for part in parts:
        if size < len(part):
            yield part[size:]
        size = max(0, size - len(part))


def new_bell() -> tuple[int, int] | None:
    """Return a pipe, one end of which wakes the reader of the other, or None if no descriptor is left."""
    try:
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def same_place(first: RawFile, second: RawFile) -> bool:
    """Return True if both write to the same terminal, pipe or file."""
    if first.descriptor is None or second.descriptor is None:
        return first._file is second._file  # noqa: SLF001 - two of one class
    return os.path.sameopenfile(first.descriptor, second.descriptor)
