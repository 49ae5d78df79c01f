"""A small file in the job's directory: up to which frame each agent was told that we have them, and what was printed."""

import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hvlaunch.console.lines import Stream

__all__ = ["SEEN", "Seen", "SeenFile", "SeenFrames"]

SEEN = "seen"
_LINK = struct.Struct("<QQQ")
_PLACES: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class Seen(NamedTuple):
    """Of one link: numbers of frames in the lasting stream."""

    told: int = 0
    """The agent may have forgotten all up to this one."""
    stdout: int = 0
    """The last one with output that was printed."""
    stderr: int = 0


class SeenFile:
    """For any thread. A number is written before anybody relies on it: what was written outlives the process.

    A disk that is full is found out by the journal.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def of(self, link: int) -> "SeenFrames":
        return SeenFrames(self._fd, link)

    def close(self) -> None:
        os.close(self._fd)


class SeenFrames:
    """Those of one link."""

    def __init__(self, fd: int, link: int) -> None:
        self._fd = fd
        self._at = link * _LINK.size
        self._lock = threading.Lock()
        data = os.pread(fd, _LINK.size, self._at)
        self.last = Seen(*_LINK.unpack(data)) if len(data) == _LINK.size else Seen()

    def tell(self, number: int) -> None:
        """The agent is about to be told that it need not keep any frame up to this one."""
        self._set(0, number)

    def print(self, stream: Stream, number: int) -> None:
        """The output of this frame was printed."""
        self._set(_PLACES[stream], number)

    def _set(self, place: int, number: int) -> None:
        with self._lock:
            if number > self.last[place]:
                fields = list(self.last)
                fields[place] = number
                self.last = Seen(*fields)
                with suppress(OSError):
                    os.pwrite(self._fd, _LINK.pack(*fields), self._at)
