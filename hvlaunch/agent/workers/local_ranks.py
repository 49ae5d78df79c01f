"""A launcher's processes on this host beside the agent: each starts the worker of its rank (agent/starter.py)."""

from __future__ import annotations

import marshal
import os
import stat
import struct
import time

from hvlaunch.agent.quick import (
    READ,
    Selector,
    accept,
    deque,
    dumps,
    peer_uid,
    signal,
    socket,
)
from hvlaunch.agent.wire.frames import LONGEST_TEXT, BadFrame, Decoder, Form, encode, text, whole
from hvlaunch.agent.workers import CannotStart, WorkerProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, Callable, Deque, Dict, List, Mapping, Sequence, Tuple, Union

    from hvlaunch.agent.wire.frames import Frame

    Modules = Mapping[str, Union[str, CodeType]]
    Meeting = Tuple[socket.socket, Modules]

__all__ = ["LocalRanks"]

_STARTERS = (
    "quick",
    "wire.frames",
    "reaper",
    "workers.__init__",
    "workers.family",
    "workers.diagnosis",
    "scratch",
    "guardian",
    "starter",
)
"""Modules of a starter's program, each behind its imports."""
_PATIENCE = 20.0  # seconds for an answer
_CANNOT = 126
_FDS = struct.Struct("3i")
_HELLO = 20
"""Bytes of a hello: rank in the job, rank on this host, magic number of this Python's compiled files."""


_CAUSE, _STATUS = text(LONGEST_TEXT), whole(0, 0xFFFF)
_LAST_SIGNAL = 64
_REPORTS = {
    "started": Form(pid=whole(1, 1 << 22)),
    "not_started": Form(code=whole(126, 127), cause=_CAUSE),
    "ended": Form(
        status=lambda value: _STATUS(value) and value & 0x7F <= _LAST_SIGNAL, max_rss=whole(0, 1 << 43)
    ),
    "parting": Form(cause=_CAUSE),
    "bye": Form(left=whole(0, 1 << 31)),
}
"""Forms of the starters' frames."""


class _Rank:
    """The agent's connection to a starter."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.decoder = Decoder(_REPORTS, 0)
        self.frames: Deque[Frame] = deque()
        self.fds: List[int] = []
        self.awaited = 0
        """Number of descriptors due with the next `started`."""
        self.deadline = 0.0
        """Time by which these must have come."""
        self.runs = False
        self.has_left = False
        self.trouble = "is gone"

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Send a frame; an error shows at the next read."""
        try:
            self.connection.settimeout(_PATIENCE)
            self.connection.sendall(encode(header, body))
        except OSError:
            pass

    def read(self, deadline: float) -> bool:
        """Receive some data; return False at the end or after the deadline, with the cause in `trouble`."""
        left = deadline - time.monotonic()
        if left <= 0.0:
            self.trouble = "does not answer"
            return False
        try:
            self.connection.settimeout(left)
            # MSG_CMSG_CLOEXEC: a worker that starts meanwhile must not inherit another's pipes.
            size = socket.CMSG_SPACE(_FDS.size)
            data, rights, _, _ = self.connection.recvmsg(1 << 16, size, socket.MSG_CMSG_CLOEXEC)
            self._take(data, rights)
        except BadFrame as error:
            self.trouble = "sent %s" % error
            return False
        except OSError:
            return False
        return bool(data)

    def _take(self, data: bytes, rights: Sequence[Tuple[int, int, bytes]]) -> None:
        """Keep frames and descriptors. Raises BadFrame for descriptors that are not due."""
        for _, _, fds in rights:
            self.fds.extend(fd for (fd,) in struct.iter_unpack("i", fds[: len(fds) // 4 * 4]))
        # Checked at once: a hostile process could otherwise use up the agent's descriptors.
        if len(self.fds) > self.awaited:
            raise BadFrame("descriptors that nobody asked for")
        self.frames.extend(self.decoder.feed(data))

    def pipes(self, header: Dict[str, Any]) -> List[int]:
        """Return the pipes of the worker that `started` reports. Raises BadFrame."""
        if header["type"] != "started":
            raise BadFrame("a frame of type %s, unasked" % header["type"])
        # A regular file or a device could block the agent's only thread.
        fds = self.fds
        if len(fds) != self.awaited or not all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in fds):
            raise BadFrame("a worker without its pipes")
        self.fds, self.awaited = [], 0
        for fd in fds:
            os.set_blocking(fd, False)
        return fds

    def close(self) -> None:
        """Close the connection; the starter then ends its worker."""
        self.has_left = True
        self.connection.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class _Worker(WorkerProcess):
    """A worker that is the child of a starter."""

    rank: _Rank

    def send_signal(self, number: int, *, group: bool) -> None:
        self.killed = self.killed or number == signal.SIGKILL
        self.rank.send({"type": "signal", "signal": number, "group": group})


class LocalRanks:
    """The starters of slot 1 and higher; the worker of slot 0 is the agent's own child.

    `ended` gets slot, wait status and KiB of an ended worker, `parted` the cause when the launcher ends a process here.
    """

    def __init__(
        self,
        meeting: Meeting,
        selector: Selector,
        ended: Callable[[int, int, int], None],
        parted: Callable[[str], None],
    ) -> None:
        self._listener, self._modules = meeting
        self._selector = selector
        self._ended = ended
        self._parted = parted
        self._missing = 0
        self._then: Callable[[], None] = lambda: None
        self._ranks: Dict[int, _Rank] = {}

    def meet(self, count: int, then: Callable[[], None]) -> None:
        """Wait for `count` starters; call `then` after the last has called."""
        self._missing = count
        self._then = then
        self._selector.register(self._listener, READ, self._accept)

    def _accept(self) -> None:
        try:
            connection = accept(self._listener)
        except OSError:
            return
        # Any user of the host can connect to a name in the abstract namespace.
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        hello = bytearray()
        self._selector.register(connection, READ, lambda: self._hear(connection, hello))

    def _hear(self, connection: socket.socket, hello: bytearray) -> None:
        """Read a process's hello, as far as it has come, so that a slow process does not delay the others."""
        try:
            part = connection.recv(_HELLO - len(hello))
        except OSError:
            part = b""
        hello += part
        if part and len(hello) < _HELLO:
            return
        self._selector.unregister(connection)
        try:
            connection.settimeout(_PATIENCE)
            slot = self._greet(connection, bytes(hello))
        except BadFrame as error:
            self._parted(str(error))
            connection.close()
            return
        except (OSError, ValueError):
            # The process has ended, which its launcher will notice, or does not belong to the job.
            connection.close()
            return
        self._ranks[slot] = rank = _Rank(connection)
        self._selector.register(connection, READ, lambda: self._receive(slot, rank))
        self._missing -= 1
        if not self._missing:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._then()

    def _greet(self, connection: socket.socket, hello: bytes) -> int:
        """Send a process the starter's program; return its slot.

        Raises BadFrame for an unexpected rank or another Python, ValueError for nonsense, OSError.
        """
        from _frozen_importlib_external import MAGIC_NUMBER  # noqa: PLC0415 (as in boot.py)

        slot = int(hello[8:16])
        # The program is code of this Python, which any other would crash on.
        if hello[16:] != MAGIC_NUMBER:
            raise BadFrame("a process that runs another Python than the first of this host")
        if slot in self._ranks or not 0 < slot <= len(self._ranks) + self._missing:
            raise BadFrame("one process too many on this host, for slot %d" % slot)
        names = ["hvlaunch.agent." + name for name in _STARTERS]
        program: List[Tuple[str, Any]] = [("hvlaunch", ""), ("hvlaunch.agent", "")]
        program.extend((name.replace(".__init__", ""), self._modules[name]) for name in names)
        data = marshal.dumps(program)
        connection.sendall(len(data).to_bytes(4, "big") + data)
        return slot

    def __contains__(self, slot: int) -> bool:
        return slot in self._ranks

    def order(self, slot: int, argv: Sequence[str], defaults: Any, env: Any, with_stdin: bool) -> None:
        """Order the start of the slot's worker; call started() next."""
        plan = {"argv": argv, "defaults": defaults, "env": env, "stdin": with_stdin, "cwd": os.getcwd()}
        rank = self._ranks[slot]
        rank.awaited = 3 if with_stdin else 2
        # From the order on, not from the wait: the starters of a host work at the same time.
        rank.deadline = time.monotonic() + _PATIENCE
        rank.send({"type": "start", "slot": slot}, dumps(plan).encode("ascii"))

    def started(self, slot: int, error_file: str) -> WorkerProcess:
        """Return the worker that was ordered. Raises CannotStart."""
        rank = self._ranks[slot]
        header = self._answer(slot, rank)
        if header["type"] == "not_started":
            rank.awaited = 0
            raise CannotStart(header["code"], header["cause"])
        try:
            stdout, stderr, *stdin = rank.pipes(header)
        except BadFrame as error:
            rank.trouble = "sent %s" % error
            raise CannotStart(_CANNOT, self._lose(slot, rank)) from None
        output = {"stdout": stdout, "stderr": stderr}
        worker = _Worker(slot, header["pid"], output, stdin[0] if stdin else None, error_file)
        worker.rank = rank
        rank.runs = True
        return worker

    def _answer(self, slot: int, rank: _Rank) -> Dict[str, Any]:
        """Return the answer to an order. Raises CannotStart."""
        while True:
            while not rank.frames:
                if not rank.read(rank.deadline):
                    raise CannotStart(_CANNOT, self._lose(slot, rank))
            header, _ = rank.frames.popleft()
            if header["type"] != "parting":
                return header
            self._parted(header["cause"])

    def catch_up(self) -> None:
        """Handle frames that came together with `started`."""
        for slot, rank in self._ranks.items():
            self._obey(slot, rank)

    def _receive(self, slot: int, rank: _Rank) -> None:
        is_connected = rank.read(time.monotonic() + _PATIENCE)
        # Frames that came before the end still count: a worker's end may be among them.
        self._obey(slot, rank)
        if not is_connected:
            self._lose(slot, rank)

    def _obey(self, slot: int, rank: _Rank) -> None:
        while rank.frames:
            header, _ = rank.frames.popleft()
            if header["type"] == "ended":
                rank.runs = False
                self._ended(slot, header["status"], header["max_rss"])
            elif header["type"] == "parting":
                self._parted(header["cause"])

    def _lose(self, slot: int, rank: _Rank) -> str:
        """Give up a starter, whose guardian ends its worker; return the cause."""
        cause = "the launcher's process for slot %d %s" % (slot, rank.trouble)
        if rank.has_left:
            return cause
        self._selector.unregister(rank.connection)
        rank.close()
        self._parted(cause)
        if rank.runs:
            rank.runs = False
            self._ended(slot, signal.SIGKILL, 0)
        return cause

    def finish(self) -> int:
        """End the starters with their processes; return the number of unkillable processes."""
        connected = [rank for rank in self._ranks.values() if not rank.has_left]
        # To all first, so that they work at the same time.
        for rank in connected:
            rank.send({"type": "bye"})
        deadline = time.monotonic() + _PATIENCE
        return sum(_left(rank, deadline) for rank in connected)


def _left(rank: _Rank, deadline: float) -> int:
    while True:
        while rank.frames:
            header, _ = rank.frames.popleft()
            if header["type"] == "bye":
                count: int = header["left"]
                return count
        if not rank.read(deadline):
            return 0
