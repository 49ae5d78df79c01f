"""The agent's end of the channel: frames in from fd 0, frames out to fd 1, never blocking."""

import os
import select
import time
from collections import deque
from typing import Any, Deque, Dict, List, Optional

from hvlaunch.agent.frames import Decoder, Frame, encode

__all__ = ["Channel"]

_READ_SIZE = 1 << 16


class Channel:
    """Frames over two file descriptors. What can't be written yet is kept, in order."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._decoder = Decoder()
        self._out: Deque[bytes] = deque()
        self.closed = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def blocked(self) -> bool:
        """Whether something waits for fd 1 to become writable."""
        return bool(self._out)

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Send a frame, now or as soon as the other side takes it."""
        self.send_raw(encode(header, body))

    def send_raw(self, data: bytes) -> None:
        if self.closed:
            return
        self._out.append(data)
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what the other side takes at once; forget everything where it is gone."""
        while self._out:
            data = self._out[0]
            try:
                written = os.write(self.write_fd, data)
            except BlockingIOError:
                return
            except OSError:
                self.give_up()
                return
            if written < len(data):
                self._out[0] = data[written:]
                return
            self._out.popleft()

    def flush_all(self, timeout: float) -> None:
        """Write everything, waiting at most `timeout` seconds for the other side."""
        deadline = time.monotonic() + timeout
        while self._out and time.monotonic() < deadline:
            select.select([], [self.write_fd], [], max(0.0, deadline - time.monotonic()))
            self.flush()

    def give_up(self) -> None:
        """Nobody listens any more: drop what waits, and what comes."""
        self._out.clear()
        self.closed = True

    def receive(self) -> Optional[List[Frame]]:
        """The frames that have arrived, none or many; None at the end. Raises BadFrame."""
        try:
            data = os.read(self.read_fd, _READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        return list(self._decoder.feed(data))
