"""A session goes on over another connection: whoever comes proves by the session's key that it is the driver, and so do we.

By ssh a carrier (agent/wire/carrier.py) joins the driver's connection to our socket, and knows no key. Where a launcher has started
us, we call the driver, as we did at first (agent/wire/caller.py).
"""

from __future__ import annotations

import _thread
import os
import time

from hvlaunch.agent.quick import READ, Selector, accept, deque, mac, peer_uid, same, socket
from hvlaunch.agent.wire.frames import BadFrame, Decoder, PieceWriter, encode
from hvlaunch.agent.wire.session import STREAMS, StaleEpoch
from hvlaunch.agent.wire.shapes import Form, exactly, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Deque, Dict, List, Optional

    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.channel import DriverChannel
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["Spill", "Visitors", "session_proof"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
_ANSWER, _LOOK = 4.0, 0.05
"""Seconds for the driver to take a call, and between two looks whether it has."""
_MOST = 8  # that may have proved nothing yet; of more the oldest is sent away
_READ_SIZE = 1 << 16
_SPILL_CHUNK = 1 << 16
_COUNT = whole(0, 1 << 53)
_WORD = text(64)
_RESUME = {
    "resume": Form(nonce=_WORD, epoch=_COUNT, have=exactly(_COUNT, STREAMS), proof=_WORD),
}


def session_proof(key: str, who: str, *words: object) -> str:
    """That `who`, the driver or the agent, has the session's key; for these words, of which the other end has made one."""
    return mac(key.encode(), "\0".join(("session", who, *map(str, words))).encode()).hex()


class Visitors:
    """Those who come. One that is the driver gets the session of `channel`: hang_up() ends the connection before.

    `go_on` is told whether it is another driver than before.
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
        """Held while nobody needs to call."""
        self._is_calling = False

    def call(
        self,
        again: Callable[[], Sealed],
        is_lost: Callable[[], bool],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Call the driver by `again`, in a thread, for as long as `is_lost`; who answers is asked in the loop (`call_soon`)."""
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
                fd = os.dup(sealed.socket.fileno())
                call_soon(lambda fd=fd, sealed=sealed: self.ask(fd, sealed))  # type: ignore[misc]
                due = time.monotonic() + _ANSWER
                while is_lost() and time.monotonic() < due:
                    time.sleep(_LOOK)
            self._is_needed.acquire()

    def let_in(self, listener: socket.socket) -> None:
        """Ask the next one at our socket for its proof; none of another user's."""
        try:
            sock = accept(listener)
        except OSError:
            return
        if peer_uid(sock) in (0, os.geteuid()):
            self.ask(sock.detach())

    def ask(self, fd: int, sealed: Optional[Sealed] = None) -> None:
        """Ask this one for its proof; `sealed` encrypts what goes through the descriptor."""
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
        words = (visitor.nonce, resume["nonce"], resume["epoch"], *resume["have"])
        if not same(resume["proof"].encode(), session_proof(self._key, "driver", *words).encode()):
            self._send_away(visitor)
            return
        self._forget(visitor)
        self._admit(visitor, resume)

    def _admit(self, visitor: _Visitor, resume: Dict[str, Any]) -> None:
        """It is the driver, or one that takes its place: go on with it, and hang up on the one before."""
        session = self._channel.session
        try:
            is_new = self._channel.begin_epoch(resume["epoch"])
            again = session.again(resume["have"])
        except (StaleEpoch, BadFrame) as error:
            visitor.send({"type": "refused", "cause": str(error)})
            os.close(visitor.fd)
            return
        have = session.tell()
        proof = session_proof(self._key, "agent", visitor.nonce, resume["nonce"], *have)
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
    """One that has proved nothing yet, and was asked to."""

    def __init__(self, fd: int, sealed: Optional[Sealed]) -> None:
        self.fd = fd
        self.sealed = sealed
        self.nonce = os.urandom(16).hex()
        self.writer = PieceWriter()
        self._decoder = Decoder(_RESUME, 0)
        os.set_blocking(fd, False)
        self.send({"type": "challenge", "nonce": self.nonce})

    def send(self, header: Dict[str, Any]) -> None:
        """One that is gone is found so when it is read."""
        data = b"".join(self.writer.cut(encode(header)))
        try:
            os.write(self.fd, data if self.sealed is None else self.sealed.seal(data))
        except OSError:
            pass

    def read(self) -> Optional[Dict[str, Any]]:
        """Its `resume`; None where it has not come yet. Raises OSError, BadFrame."""
        data = os.read(self.fd, _READ_SIZE)
        if not data:
            raise BadFrame("nothing")
        if self.sealed is not None:
            data = self.sealed.open(data)
        frames = list(self._decoder.feed(data))
        return frames[0][0] if frames else None


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
