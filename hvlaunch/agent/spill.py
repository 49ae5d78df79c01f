"""A file for what workers print while no driver takes it."""

from __future__ import annotations

import os

from hvlaunch.agent.frames import Decoder, encode
from hvlaunch.agent.quick import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict

    from hvlaunch.agent.frames import Frame

__all__ = ["Spill"]

_CHUNK = 1 << 16


class Spill:
    """Frames in order, in a file of about `limit` bytes without a name. Where the disk is full, the last few stay in memory."""

    def __init__(self, directory: str, limit: int) -> None:
        path = os.path.join(directory, "spill")
        self._limit = limit
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.unlink(path)
        except OSError:
            self._fd = -1  # which no write can go to
        self._read = self._written = 0
        self._decoder = Decoder()
        self._next: Deque[Frame] = deque()
        """What was read from the file."""
        self._late: Deque[Frame] = deque()
        """What did not go into it."""
        self._ends = 0

    @property
    def has_room(self) -> bool:
        return self._written < self._limit and not self._late

    @property
    def has_end(self) -> bool:
        """Whether a worker's end waits here."""
        return self._ends > 0

    @property
    def is_empty(self) -> bool:
        return self._read == self._written and not self._next and not self._late

    def put(self, header: Dict[str, Any], body: bytes) -> None:
        """Behind all others."""
        self._ends += header["type"] == "exited"
        if not self._late:
            data = encode(header, body)
            try:
                if os.pwrite(self._fd, data, self._written) == len(data):
                    self._written += len(data)
                    return
            except OSError:
                pass
        self._late.append((header, body))

    def take(self) -> Frame:
        """The first. Raises OSError where the disk does not give it back."""
        while not self._next and self._read < self._written:
            data = os.pread(self._fd, min(_CHUNK, self._written - self._read), self._read)
            if not data:
                raise OSError("a file of the scratch directory has lost its end")
            self._read += len(data)
            self._next.extend(self._decoder.feed(data))
        frame = (self._next or self._late).popleft()
        self._ends -= frame[0]["type"] == "exited"
        return frame

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
