"""An agent without a connection: output waits in a file, and another connection may continue the session.

Driver and agent prove to each other that they have the session's key. By ssh, a carrier (agent/wire/carrier.py) joins the
driver's new connection to the agent's socket; a carrier knows no key. An agent of a launcher calls the driver again
(agent/wire/caller.py).
"""

from __future__ import annotations

import _thread
import os
import time

from hvlaunch.agent.quick import READ, Selector, accept, deque, mac, peer_uid, same, socket
from hvlaunch.agent.wire.frames import (
    STREAMS,
    BadFrame,
    Decoder,
    Form,
    PieceWriter,
    StaleEpoch,
    encode,
    exactly,
    text,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, List, Optional

    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.channel import DriverChannel
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["Spill", "Visitors", "session_proof"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_ANSWER, _POLL = 4.0, 0.05
"""Seconds for the driver to take a call, and between two checks."""
_MOST = 8  # unauthenticated connections at a time; the oldest of more is closed
_READ_SIZE = 1 << 16
_SPILL_CHUNK = 1 << 16
_COUNT = whole(0, 1 << 53)
_WORD = text(64)
_RESUME = {
    "resume": Form(nonce=_WORD, epoch=_COUNT, have=exactly(_COUNT, STREAMS), proof=_WORD),
}


def session_proof(key: str, side: str, *words: object) -> str:
    """HMAC of `words`, which include both nonces, by `side` ("driver" or "agent") with the session's key."""
    return mac(key.encode(), "\0".join(("session", side, *map(str, words))).encode()).hex()


class Visitors:
    """Connections that claim to be the driver's; a proven one continues the session of `channel`.

    Calls hang_up() to end the previous connection, and then go_on() with True for a successor.
    """

    def __init__(
        self,
        channel: DriverChannel,
        selector: Selector,
        key: str,
        hang_up: Callable[[], None],
        go_on: Callable[[bool], None],
    ) -> None:
        self._channel = channel
        self._selector = selector
        self._key = key
        self._hang_up = hang_up
        self._go_on = go_on
        self._visitors: List[_Visitor] = []
        self._is_needed = _thread.allocate_lock()
        """Held by the calling thread while the connection stands."""
        self._is_calling = False

    def call(
        self,
        again: Callable[[], Sealed],
        is_lost: Callable[[], bool],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Call the driver by `again`, in a thread, while `is_lost`; the loop challenges each answer (`call_soon`)."""
        if not self._is_calling:
            self._is_calling = True
            _thread.start_new_thread(self._call, (again, is_lost, call_soon))
        elif self._is_needed.locked():
            self._is_needed.release()

    def _call(
        self,
        again: Callable[[], Sealed],
        is_lost: Callable[[], bool],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        while True:
            pause = _FIRST_PAUSE
            while is_lost():
                try:
                    sealed = again()
                except SystemExit:
                    time.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
                # A copy, because the socket object closes its own descriptor once this thread drops it.
                fd = os.dup(sealed.socket.fileno())
                call_soon(lambda fd=fd, sealed=sealed: self.ask(fd, sealed))  # type: ignore[misc]
                due = time.monotonic() + _ANSWER
                while is_lost() and time.monotonic() < due:
                    time.sleep(_POLL)
            self._is_needed.acquire()

    def let_in(self, listener: socket.socket) -> None:
        """Challenge the next connection at the agent's socket, unless it is another user's."""
        try:
            sock = accept(listener)
        except OSError:
            return
        if peer_uid(sock) in (0, os.geteuid()):
            self.ask(sock.detach())

    def ask(self, fd: int, sealed: Optional[Sealed] = None) -> None:
        """Challenge a connection for a proof; `sealed` encrypts its bytes."""
        # The oldest: otherwise strangers that keep silent would lock the driver out.
        if len(self._visitors) == _MOST:
            self._send_away(self._visitors[0])
        visitor = _Visitor(fd, sealed)
        self._visitors.append(visitor)
        self._selector.register(fd, READ, lambda: self._hear(visitor))

    def _hear(self, visitor: _Visitor) -> None:
        try:
            resume = visitor.read()
            if resume is None:
                return
        except (OSError, BadFrame):
            self._send_away(visitor)
            return
        # The proof covers epoch and counts too: a carrier's host could change them on their way.
        words = (visitor.nonce, resume["nonce"], resume["epoch"], *resume["have"])
        if not same(resume["proof"].encode(), session_proof(self._key, "driver", *words).encode()):
            self._send_away(visitor)
            return
        self._forget(visitor)
        self._admit(visitor, resume)

    def _admit(self, visitor: _Visitor, resume: Dict[str, Any]) -> None:
        """Continue the session over a proven connection, and end the previous one."""
        session = self._channel.session
        try:
            is_new = self._channel.begin_epoch(resume["epoch"])
            again = session.again(resume["have"])
        except (StaleEpoch, BadFrame) as error:
            visitor.send({"type": "refused", "cause": str(error)})
            os.close(visitor.fd)
            return
        # The agent proves itself only now, to a driver that has proved itself: a stranger gets no proof to study.
        have = session.tell()
        proof = session_proof(self._key, "agent", visitor.nonce, resume["nonce"], *have)
        # The previous connection may look alive for minutes, if its machine is down or cut off.
        self._hang_up()
        resumed = encode({"type": "resumed", "have": have, "proof": proof})
        self._channel.join(visitor.fd, visitor.writer, visitor.sealed, [resumed, *again])
        self._go_on(is_new)

    def _send_away(self, visitor: _Visitor) -> None:
        self._forget(visitor)
        os.close(visitor.fd)

    def _forget(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.fd)


class _Visitor:
    """An unauthenticated connection with a pending challenge."""

    def __init__(self, fd: int, sealed: Optional[Sealed]) -> None:
        self.fd = fd
        self.sealed = sealed
        self.nonce = os.urandom(16).hex()
        self.writer = PieceWriter()
        self._decoder = Decoder(_RESUME, 0)
        os.set_blocking(fd, False)
        self.send({"type": "challenge", "nonce": self.nonce})

    def send(self, header: Dict[str, Any]) -> None:
        """Send a frame; an error shows at the next read."""
        data = b"".join(self.writer.cut(encode(header)))
        try:
            os.write(self.fd, data if self.sealed is None else self.sealed.seal(data))
        except OSError:
            pass

    def read(self) -> Optional[Dict[str, Any]]:
        """Return its `resume`; None if the frame is not complete yet. Raises OSError, BadFrame."""
        data = os.read(self.fd, _READ_SIZE)
        if not data:
            raise BadFrame("nothing")
        if self.sealed is not None:
            data = self.sealed.open(data)
        frames = list(self._decoder.feed(data))
        return frames[0][0] if frames else None


class Spill:
    """Frames in order, in an unlinked file of about `limit` bytes; once the disk is full, further frames stay in memory."""

    def __init__(self, directory: str, limit: int) -> None:
        path = os.path.join(directory, "spill")
        self._limit = limit
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Without a name the file goes with the process, even after kill -9.
            os.unlink(path)
        except OSError:
            self._fd = -1  # each write fails, and frames stay in memory
        self._read = self._written = 0
        self._decoder = Decoder()
        self._next: Deque[Frame] = deque()
        """Frames read from the file."""
        self._late: Deque[Frame] = deque()
        """Frames that the file did not take."""
        self._ends = 0

    @property
    def has_room(self) -> bool:
        return self._written < self._limit and not self._late

    @property
    def has_end(self) -> bool:
        """True if a worker's end waits here."""
        return self._ends > 0

    @property
    def is_empty(self) -> bool:
        return self._read == self._written and not self._next and not self._late

    def put(self, header: Dict[str, Any], body: bytes) -> None:
        """Append a frame."""
        self._ends += header["type"] == "exited"
        # Once a frame is in memory, later frames must not go into the file: it would be sent first.
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
        """Remove and return the first frame. Raises OSError if the disk fails."""
        while not self._next and self._read < self._written:
            data = os.pread(self._fd, min(_SPILL_CHUNK, self._written - self._read), self._read)
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
