"""Lines whose beginning was taken from an agent and is shown nowhere yet: kept for another driver."""

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
_LONGEST = _PLACE - _HEAD.size


class UnfinishedLines:
    """In a file, which is made when there is one. For one thread.

    A line of more than 64 KB is not kept, nor is any where the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.noted: dict[Key, bytes] = {}
        """Lines that are not empty, by this process."""

    def note(self, key: Key, text: bytes) -> None:
        """So the unfinished line of this rank and stream begins now; empty where there is none."""
        text = text if len(text) <= _LONGEST else b""
        if text == self.noted.get(key, b""):
            return
        with suppress(OSError):
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
            rank, stream = key
            place = _PLACE * (len(_STREAMS) * rank + _STREAMS.index(stream))
            os.pwrite(self._file, _HEAD.pack(len(text), zlib.crc32(text)) + text, place)
            self.noted[key] = text
            if not text:
                del self.noted[key]

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
                    text = os.pread(file, min(size, _LONGEST), _PLACE * number + _HEAD.size)
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
        self.noted.clear()
