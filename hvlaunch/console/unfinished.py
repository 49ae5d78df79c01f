"""Lines whose beginning was taken from an agent and is shown nowhere yet: kept for another driver."""

import mmap
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

from hvlaunch.console.lines import Key, Stream

__all__ = ["UnfinishedLines"]

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
_HEAD = struct.Struct("<II")
_PLACE = 1 << 16
"""Bytes in the file for each rank and stream. It has holes: only what was written takes room."""
_PAGE = mmap.ALLOCATIONGRANULARITY
_SHARED = 256
"""Places in one piece of shared memory: each piece takes a descriptor."""


class UnfinishedLines:
    """In a file, which is made when there is one. For one thread.

    A line of more than `longest` bytes is not kept, nor is any where the disk is full. Short ones are written to memory that
    the file shares: a call of the kernel for each page that is printed would be a tenth of what printing costs.
    """

    longest = _PLACE - _HEAD.size

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._shared: dict[int, mmap.mmap] = {}
        self._has_block: set[int] = set()
        """Places whose first page is on the disk: to write to memory of one that is not, on a full disk, is the process' end."""
        self.noted: dict[Key, bytes] = {}
        """Lines that are not empty, by this process."""

    def note(self, key: Key, text: bytes) -> None:
        """So the unfinished line of this rank and stream begins now; empty where there is none."""
        text = text if len(text) <= self.longest else b""
        if text == self.noted.get(key, b""):
            return
        with suppress(OSError):
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
            rank, stream = key
            number = len(_STREAMS) * rank + _STREAMS.index(stream)
            self._write(number, _HEAD.pack(len(text), zlib.crc32(text)) + text)
            self.noted[key] = text
            if not text:
                del self.noted[key]

    def _write(self, number: int, data: bytes) -> None:
        group, place = divmod(number, _SHARED)
        if number in self._has_block and len(data) <= _PAGE and group in self._shared:
            self._shared[group][_PLACE * place : _PLACE * place + len(data)] = data
            return
        data = data.ljust(_PAGE, b"\0")
        if os.pwrite(self._file, data, _PLACE * number) == len(data):
            self._has_block.add(number)
        if group not in self._shared:
            size = _PLACE * _SHARED
            with suppress(OSError):  # then the kernel is called for each
                os.truncate(self._file, max(os.fstat(self._file).st_size, size * (group + 1)))
                self._shared[group] = mmap.mmap(self._file, size, offset=size * group)

    def read(self) -> dict[Key, bytes]:
        """What another process has noted."""
        lines: dict[Key, bytes] = {}
        with suppress(OSError):
            file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for number in range(-(-os.fstat(file).st_size // _PLACE)):
                    size, check = _HEAD.unpack(
                        os.pread(file, _HEAD.size, _PLACE * number).ljust(_HEAD.size, b"\0")
                    )
                    text = os.pread(file, min(size, self.longest), _PLACE * number + _HEAD.size)
                    if text and zlib.crc32(text) == check:
                        rank, stream = divmod(number, len(_STREAMS))
                        lines[rank, _STREAMS[stream]] = text
            finally:
                os.close(file)
        return lines

    def forget(self) -> None:
        """They are kept elsewhere now."""
        self._path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        self._has_block.clear()
        self.noted.clear()
