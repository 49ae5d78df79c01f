"""The agent's end of the channel: frames in from fd 0, frames out to fd 1, never blocking."""

from __future__ import annotations

import os
import select
import time

from hvlaunch.agent.quick import deque
from hvlaunch.agent.wire.frames import FRAME_COST, Decoder, PieceWriter, encode
from hvlaunch.agent.wire.orders import ORDERS
from hvlaunch.agent.wire.session import BY_AGENT, BY_DRIVER, Session, is_of_epoch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["DriverChannel"]

_READ_SIZE = 1 << 16
_AFTER_BYE = ("have", "pong")


class DriverChannel:
    """Frames over two file descriptors, outwards in pieces. What can't be written yet is kept, in order.

    Relayed frames and all others keep their own order and take turns, so neither waits long for the other.
    """

    def __init__(self, read_fd: int, write_fd: int, sealed: Optional[Sealed] = None) -> None:
        """`sealed` encrypts what goes through them, where nothing else does."""
        self.sealed = sealed
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._decoder = Decoder(ORDERS)
        self._writer = PieceWriter()
        self._begun: Deque[bytes] = deque()
        self._own: Deque[Tuple[str, bytes]] = deque()
        self._relayed: Deque[Tuple[str, bytes]] = deque()
        self._own_turn = True
        self.session = Session(BY_AGENT, BY_DRIVER)
        self.can_rejoin = False
        """Whether what is sent is kept for another connection, where this one is lost."""
        self.is_away = False
        """Whether the connection is lost, and no other is there yet."""
        self.closed = False
        self._has_parted = False
        """Whether bye was sent, behind which nothing is told."""
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def blocked(self) -> bool:
        """Whether something waits for fd 1 to become writable."""
        return not self.is_away and bool(self._begun or self._own or self._relayed)

    @property
    def is_acknowledged(self) -> bool:
        """True if the driver has acknowledged all frames but the last, or if frames can't be sent again anyway."""
        return not self.can_rejoin or (not self._own and self.session.kept <= 1)

    @property
    def relayed_frames(self) -> int:
        """How many relayed frames wait."""
        return len(self._relayed)

    def send(self, header: Dict[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Send a frame, now or as soon as the other side takes it."""
        kind = header["type"]
        if self.closed or (self.is_away and kind not in BY_AGENT):
            return
        if self._has_parted and kind not in _AFTER_BYE:
            return
        self._has_parted |= kind == "bye"
        blocked = self.blocked
        (self._relayed if relayed else self._own).append((kind, encode(header, body)))
        if not blocked:
            self.flush()

    def flush(self) -> None:
        """Write what the other side takes at once."""
        while self.blocked:
            if not self._begun:
                kind, frame = self._next()
                self.session.sending(kind, frame)
                self._begin(frame)
            piece = self._begun[0]
            try:
                written = os.write(self.write_fd, piece)
            except BlockingIOError:
                return
            except OSError:
                self.lose()
                return
            if written < len(piece):
                self._begun[0] = piece[written:]
                return
            self._begun.popleft()

    def _begin(self, frame: bytes) -> None:
        pieces = self._writer.cut(frame)
        if self.sealed is None:
            self._begun.extend(pieces)
        else:
            self._begun.append(self.sealed.seal(b"".join(pieces)))

    def _next(self) -> Tuple[str, bytes]:
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

    def lose(self) -> None:
        """The connection is gone: keep what waits for another, if there can be one."""
        self._begun.clear()
        self.is_away = True
        if not self.can_rejoin:
            self._own.clear()
            self._relayed.clear()
            self.closed = True

    def begin_epoch(self, epoch: int) -> bool:
        """A driver takes the session up; whether it is another than before. Raises StaleEpoch."""
        is_new = self.session.begin_epoch(epoch)
        if is_new:
            self._relayed.clear()
            self._own = deque(waiting for waiting in self._own if not is_of_epoch(waiting[0]))
        return is_new

    def join(self, fd: int, writer: PieceWriter, sealed: Optional[Sealed], frames: Sequence[bytes]) -> None:
        """Go on over this descriptor: with these frames, of which none is numbered now, then with what waits."""
        self._begun.clear()
        for ours in (self.read_fd, self.write_fd):
            os.dup2(fd, ours)
        os.close(fd)
        self.sealed = sealed
        self._decoder = Decoder(ORDERS)
        self._writer = writer
        self.is_away = False
        for frame in frames:
            self._begin(frame)
        self.flush()

    def receive(self) -> Optional[List[Frame]]:
        """The frames that have arrived, none or many; None at the end. Raises BadFrame."""
        try:
            data = os.read(self.read_fd, _READ_SIZE)
            if not data:
                return None
            if self.sealed is not None:
                data = self.sealed.open(data)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._decoder.feed(data))

    def received(self, frame: Frame) -> None:
        """The frame was dealt with: the driver need not send it again."""
        header, body = frame
        is_due = self.session.received(header["type"], len(body) + FRAME_COST)
        if is_due or (header["type"] == "ping" and self.session.has_news):
            self.send({"type": "have", "frames": self.session.tell()})
