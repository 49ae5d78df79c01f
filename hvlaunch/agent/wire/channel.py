"""The agent's end of the channel: frames from fd 0 and to fd 1, without blocking, and the forms of the driver's frames."""

from __future__ import annotations

import os
import select
import time

from hvlaunch.agent.quick import deque
from hvlaunch.agent.wire.frames import (
    BY_AGENT,
    BY_DRIVER,
    ERRAND_CHUNK,
    FRAME_COST,
    LONGEST_ARGUMENTS,
    MOST_PORTS,
    PORT,
    ROOM,
    STREAMS,
    Choice,
    Decoder,
    Form,
    PieceWriter,
    Session,
    encode,
    exactly,
    flag,
    is_of_epoch,
    mapping,
    number,
    of,
    or_null,
    pair,
    record,
    several,
    text,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple, Union

    from hvlaunch.agent.wire.caller import Sealed
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["ORDERS", "PLAN", "DriverChannel"]

# The limits only keep a broken driver from filling the host's memory: no real job comes near.
_ALL = 1 << 28
_COUNT = whole(0, 1 << 53)
_SLOT = whole(0, 1 << 31)
# 64 is SIGRTMAX; 0 would be a mere test for the process.
_SIGNAL = whole(1, 64)
_SECONDS = number(0, 1 << 53)
_NAME = text(1 << 10)
_WORDS = text(_ALL, raw=True)
"""A text of the user: a path, a command, a variable."""
_VARIABLES = mapping(_WORDS, _WORDS, 1 << 20)
_RENDEZVOUS = {
    "candidates": several(pair(_NAME, PORT), 1 << 12),
    "key": _NAME,
    "relay": of("auto", "always", "never"),
}
_ID = whole(1, 1 << 53)
_HAVE = exactly(_COUNT, STREAMS)

ORDERS: Dict[str, Union[Form, Choice]] = {
    "hello": Form(
        optional=("more_ports", "python"),
        protocol=_COUNT,
        name=_WORDS,
        key=_NAME,
        known_as=or_null(_NAME),
        cwd=_WORDS,
        gpus=flag,
        ports=or_null(pair(PORT, PORT)),
        more_ports=whole(1, MOST_PORTS),
        elastic=or_null(_SECONDS),
        processes=whole(1, 1 << 16),
        rendezvous=or_null(record(_RENDEZVOUS)),
        session=or_null(_NAME),
        python=pair(_WORDS, or_null(_WORDS)),
    ),
    "modules": Form(1 << 20),
    "call": Form(1 << 20, 1),
    "probe": Form(target=_NAME, agent=_COUNT, addresses=several(_NAME, 1 << 12), port=PORT, key=_NAME),
    "vouch": Form(target=_NAME, addresses=several(_NAME, 1 << 12), port=PORT, key=_NAME),
    "start": Form(_ALL, 1, round=_SLOT),
    "hold": Form(directory=_WORDS, names=several(text(128), 1 << 10), note=_NAME),
    "stdin": Form(1 << 20, slot=_SLOT),
    "stop": Form(slots=or_null(several(_SLOT, 1 << 20)), steps=several(pair(_SIGNAL, _SECONDS), 1 << 10)),
    "signal": Form(slots=or_null(several(_SLOT, 1 << 20)), signal=_SIGNAL),
    "ack": Form(bytes=_COUNT),
    "relay": Choice(
        "what",
        data=Form(1 << 20, 1, id=_ID),
        end=Form(id=_ID),
        close=Form(id=_ID),
        credit=Form(id=_ID, bytes=_COUNT),
    ),
    "errand": Choice(
        "what",
        code=Form(1 << 20, 1, name=_NAME),
        start=Form(
            LONGEST_ARGUMENTS,
            1,
            id=_ID,
            name=_NAME,
            seconds=or_null(_SECONDS),
            memory=or_null(_COUNT),
            output=or_null(_COUNT),
        ),
        data=Form(ERRAND_CHUNK, 1, id=_ID),
        end=Form(id=_ID),
        credit=Form(id=_ID, bytes=_COUNT),
        stop=Form(id=_ID),
    ),
    "ping": Form(),
    "patience": Form(seconds=_SECONDS),
    "have": Form(frames=_HAVE),
    "leave": Form(),
    "bye": Form(),
}

# A shape of its own and no form: the plan is the body of a frame, because headers have a lower limit.
PLAN = record(
    {
        "argv": several(_WORDS, 1 << 22),
        "cwd": or_null(_WORDS),
        "defaults": _VARIABLES,
        "env": _VARIABLES,
        "result": flag,
        "workers": several(
            record(
                {
                    "slot": _SLOT,
                    "start": _SLOT,
                    "env": _VARIABLES,
                    "stdin": flag,
                    "argv": several(_WORDS, 1 << 22),
                },
                # A command without places is the same for all workers.
                optional=("argv",),
            ),
            1 << 16,
        ),
        # With --bind or --gpus-per-worker; `slots` is the number of workers that share the host.
        # With roles, `gpus` has the number of GPUs for each slot.
        "bind": record(
            {
                "mode": _NAME,
                "gpus_per_worker": or_null(_SLOT),
                "slots": _SLOT,
                "gpus": several(or_null(_SLOT), 1 << 16),
            },
            optional=("gpus",),
        ),
        # With --preload; `program` is agent/workers/standby.py.
        "preload": record({"modules": several(_WORDS, 1 << 10), "program": _WORDS}),
        # Paths to put before and behind a variable's own.
        "first": _VARIABLES,
        "last": _VARIABLES,
    },
    optional=("bind", "preload", "first", "last"),
)
"""The body of a `start`."""


_READ_SIZE = 1 << 16
_AFTER_BYE = ("have", "pong")


class DriverChannel:
    """Frames over two file descriptors; frames that can't be written yet wait, in order.

    Relayed and other frames wait in two queues and take turns, so neither waits long for the other.
    """

    def __init__(self, read_fd: int, write_fd: int, sealed: Optional[Sealed] = None) -> None:
        """`sealed` encrypts the bytes; None if ssh does."""
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
        """True if sent frames are kept for another connection, in case this connection is lost."""
        self.is_away = False
        """True while the connection is lost and no other has replaced it."""
        self.closed = False
        self._has_parted = False
        """True once bye was sent, the last frame of a session."""
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    @property
    def blocked(self) -> bool:
        """True if bytes wait for fd 1 to become writable."""
        return not self.is_away and bool(self._begun or self._own or self._relayed)

    @property
    def is_acknowledged(self) -> bool:
        """True if the driver has acknowledged all frames but the last, or if frames can't be sent again anyway."""
        return not self.can_rejoin or (not self._own and self.session.kept <= 1)

    @property
    def relayed_frames(self) -> int:
        """Number of waiting relayed frames."""
        return len(self._relayed)

    def send(self, header: Dict[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Send a frame at the next flush(), or as soon as the other side can take data."""
        kind = header["type"]
        # A frame without a number, such as a pong, is of no use to another connection.
        if self.closed or (self.is_away and kind not in BY_AGENT):
            return
        if self._has_parted and kind not in _AFTER_BYE:
            return
        self._has_parted |= kind == "bye"
        (self._relayed if relayed else self._own).append((kind, encode(header, body)))

    def flush(self) -> None:
        """Write as much as the other side takes at once."""
        while self.blocked:
            if not self._begun:
                self._begin(self._next_frames())
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

    def _next_frames(self) -> bytes:
        """Return the next frame, together with further small ones: each write costs sshd and the driver a packet."""
        frames: List[bytes] = []
        size = 0
        while size < ROOM and (self._own or self._relayed):
            kind, frame = self._next()
            # Counted just before the first byte is written, in the order in which the other end will count it.
            self.session.sending(kind, frame)
            frames.append(frame)
            size += len(frame)
        return b"".join(frames)

    def _begin(self, frames: bytes) -> None:
        pieces = self._writer.cut(frames)
        # Without TLS each piece is a write of its own, because another program may write into the same pipe.
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
        """Write all frames, waiting at most `timeout` seconds for the other side."""
        deadline = time.monotonic() + timeout
        while self.blocked and time.monotonic() < deadline:
            select.select([], [self.write_fd], [], max(0.0, deadline - time.monotonic()))
            self.flush()

    def lose(self) -> None:
        """Note the loss of the connection; keep waiting frames if another connection can replace it."""
        # Half a frame is worthless on another connection, which gets the frame again from the session.
        self._begun.clear()
        self.is_away = True
        if not self.can_rejoin:
            self._own.clear()
            self._relayed.clear()
            self.closed = True

    def begin_epoch(self, epoch: int) -> bool:
        """Continue with a driver; return True for a successor. Raises StaleEpoch."""
        is_new = self.session.begin_epoch(epoch)
        if is_new:
            self._relayed.clear()
            self._own = deque(waiting for waiting in self._own if not is_of_epoch(waiting[0]))
        return is_new

    def join(self, fd: int, writer: PieceWriter, sealed: Optional[Sealed], frames: Sequence[bytes]) -> None:
        """Continue over this descriptor: first with `frames`, which the session has counted already, then with waiting frames."""
        self._begun.clear()
        # Onto the same numbers, so that the guardian and the loop need not learn of other descriptors.
        for old_fd in (self.read_fd, self.write_fd):
            os.dup2(fd, old_fd)
        os.close(fd)
        self.sealed = sealed
        self._decoder = Decoder(ORDERS)
        self._writer = writer
        self.is_away = False
        for frame in frames:
            self._begin(frame)
        self.flush()

    def receive(self) -> Optional[List[Frame]]:
        """Return the frames that have arrived; None at the end. Raises BadFrame."""
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
        """Record a handled frame; acknowledge frames from time to time."""
        header, body = frame
        is_due = self.session.received(header["type"], len(body) + FRAME_COST)
        # Pings come at least twice per lease, so even a slow trickle of frames is acknowledged soon.
        if is_due or (header["type"] == "ping" and self.session.has_news):
            self.send({"type": "have", "frames": self.session.tell()})
