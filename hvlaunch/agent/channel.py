"""The agent's end of the channel: frames in from fd 0, frames out to fd 1, never blocking."""

from __future__ import annotations

import os
import select
import time

from hvlaunch.agent.frames import Decoder, encode
from hvlaunch.agent.orders import ORDERS
from hvlaunch.agent.pieces import PieceWriter
from hvlaunch.agent.quick import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, List, Optional

    from hvlaunch.agent.caller import Sealed
    from hvlaunch.agent.frames import Frame

__all__ = ["DriverChannel"]

_READ_SIZE = 1 << 16


class DriverChannel:
    """Frames over two file descriptors, outwards in pieces. What can't be written yet is kept, in order.

    Relayed frames and all others keep their own order and take turns, so neither waits long for the other.
    """

    def __init__(self, read_fd: int, write_fd: int, sealed: Optional[Sealed] = None) -> None:
        """`sealed` encrypts what goes through them, where nothing else does."""
        self._sealed = sealed
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._decoder = Decoder(ORDERS)
        self._writer = PieceWriter()
        self._begun: Deque[bytes] = deque()
        self._own: Deque[bytes] = deque()
        self._relayed: Deque[bytes] = deque()
        self._own_turn = True
        self.closed = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def blocked(self) -> bool:
        """Whether something waits for fd 1 to become writable."""
        return bool(self._begun or self._own or self._relayed)

    @property
    def relayed_frames(self) -> int:
        """How many relayed frames wait."""
        return len(self._relayed)

    def send(self, header: Dict[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Send a frame, now or as soon as the other side takes it."""
        if self.closed:
            return
        blocked = self.blocked
        (self._relayed if relayed else self._own).append(encode(header, body))
        if not blocked:
            self.flush()

    def flush(self) -> None:
        """Write what the other side takes at once; forget everything where it is gone."""
        while self.blocked:
            if not self._begun:
                pieces = self._writer.cut(self._next())
                if self._sealed is None:
                    self._begun.extend(pieces)
                else:
                    self._begun.append(self._sealed.seal(b"".join(pieces)))
            piece = self._begun[0]
            try:
                written = os.write(self.write_fd, piece)
            except BlockingIOError:
                return
            except OSError:
                self.give_up()
                return
            if written < len(piece):
                self._begun[0] = piece[written:]
                return
            self._begun.popleft()

    def _next(self) -> bytes:
        self._own_turn = bool(self._own) and (self._own_turn or not self._relayed)
        queue = self._own if self._own_turn else self._relayed
        self._own_turn = not self._own_turn
        return queue.popleft()

    def flush_all(self, timeout: float) -> None:
        """Write everything, waiting at most `timeout` seconds for the other side."""
        deadline = time.monotonic() + timeout
        while self.blocked and time.monotonic() < deadline:
            select.select([], [self.write_fd], [], max(0.0, deadline - time.monotonic()))
            self.flush()

    def give_up(self) -> None:
        """Nobody listens any more: drop what waits, and what comes."""
        self._begun.clear()
        self._own.clear()
        self._relayed.clear()
        self.closed = True

    def receive(self) -> Optional[List[Frame]]:
        """The frames that have arrived, none or many; None at the end. Raises BadFrame."""
        try:
            data = os.read(self.read_fd, _READ_SIZE)
            if not data:
                return None
            if self._sealed is not None:
                data = self._sealed.open(data)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._decoder.feed(data))
