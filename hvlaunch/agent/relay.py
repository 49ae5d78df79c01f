"""Workers' connections to the rendezvous, carried in frames where this host can't reach the driver's port.

Data flows by credit: at most RELAY_WINDOW bytes of a connection are on their way in one
direction, so neither a slow worker nor a slow driver makes memory grow.
"""

from __future__ import annotations

import os
import resource
import socket
import struct

from hvlaunch.agent.quick import READ, WRITE, Selector
from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import MOST_RELAYED, BadFrame
from hvlaunch.agent.wire.frames import RELAY_CHUNK as CHUNK
from hvlaunch.agent.wire.frames import RELAY_WINDOW as WINDOW

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

__all__ = ["RelayListener"]

_HELD = 8  # frames that wait for the channel, after which no more is read from workers
_SOCK_DIAG = 4
_OWNER = 80  # where uid and inode are in what it answers


class _Connection:
    """A worker's connection. `waiting` is for the worker; `ending` is what the driver said comes behind it."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.socket = sock
        self.credit = WINDOW
        self.reading = True
        self.held = False
        self.watched = 0
        self.waiting = bytearray()
        self.taken = 0
        self.ending = ""


class RelayListener:
    """Listens on a loopback port for workers; the driver's end of each connection is in driver/links/relay.py.

    `relay` frames have the connection's number `id` and `what`: `open` (by the agent only), `data` (body: bytes),
    `end` (no more data from this side), `close` (the connection is over; what was sent before still counts),
    `credit` (`bytes` were passed on).
    """

    def __init__(self, channel: DriverChannel, selector: Selector) -> None:
        self._channel = channel
        self._selector = selector
        self._connections: Dict[int, _Connection] = {}
        self._opened = 0
        self._held: List[_Connection] = []
        self._listener = socket.socket()
        self._shut = True
        # At most half of our file descriptors: whoever connects here, workers can still be started.
        self._most = self._room = min(MOST_RELAYED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def listen(self) -> int:
        """Let workers come; the port on 127.0.0.1. Raises OSError."""
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        return port

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out a `relay` frame. One about a connection that has ended here is late, and nothing.

        Raises BadFrame for data beyond the window.
        """
        connection = self._connections.get(header["id"])
        if connection is None:
            return
        what = header["what"]
        if what == "data":
            if len(connection.waiting) + len(body) > WINDOW:
                raise BadFrame("relayed data beyond the window")
            connection.waiting += body
        elif what == "credit":
            connection.credit += header["bytes"]
        else:
            connection.ending = what
            connection.reading = connection.reading and what != "close"
        self._write(connection)

    def read_on(self) -> None:
        """Once the channel has taken what waited: let workers in, and read from those that had to be held up."""
        if self._is_held_up:
            return
        if self._shut and len(self._connections) < self._room:
            self._shut = False
            self._selector.register(self._listener, READ, self._accept)
        if self._held:
            held, self._held = self._held, []
            for connection in held:
                connection.held = False
                self._watch(connection)

    def close(self) -> None:
        """The driver is gone: hang up, and answer nobody any more."""
        self._most = self._room = 0
        self._shut_out()
        self._listener.close()
        self._hang_up()

    def begin_epoch(self) -> None:
        """Another driver is there, which knows of none of these connections."""
        self._hang_up()
        self._opened = 0

    def _hang_up(self) -> None:
        for connection in list(self._connections.values()):
            self._forget(connection)

    @property
    def _is_held_up(self) -> bool:
        return self._channel.relayed_frames >= _HELD

    def _send(self, connection: _Connection, what: str, body: bytes = b"", **more: int) -> None:
        header = {"type": "relay", "id": connection.number, "what": what, **more}
        self._channel.send(header, body, relayed=True)

    def _accept(self) -> None:
        """Let one in. Half of the places are for programs of this user and root alone."""
        if self._shut or self._is_held_up:
            self._shut_out()
            return
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no file descriptor is left
            self._room = len(self._connections)
            self._shut_out()
            return
        if len(self._connections) >= self._most // 2 and not _is_ours(peer, sock.getsockname()):
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opened += 1
        connection = self._connections[self._opened] = _Connection(self._opened, sock)
        self._send(connection, "open")
        self._watch(connection)
        if len(self._connections) == self._most:
            self._shut_out()

    def _shut_out(self) -> None:
        """The next ones wait, until read_on() finds room."""
        if not self._shut:
            self._selector.unregister(self._listener)
        self._shut = True

    def _watch(self, connection: _Connection) -> None:
        """Wait for what can be done next, which is nothing where the driver has to give credit first."""
        events = WRITE if connection.waiting else 0
        if connection.reading and connection.credit > 0 and not connection.held:
            events |= READ
        if events == connection.watched:
            return
        if not connection.watched:
            self._selector.register(connection.socket, events, lambda: self._serve(connection))
        elif not events:
            self._selector.unregister(connection.socket)
        else:
            self._selector.modify(connection.socket, events, lambda: self._serve(connection))
        connection.watched = events

    def _serve(self, connection: _Connection) -> None:
        if connection.number in self._connections and connection.waiting:
            self._write(connection)
        if connection.number in self._connections and connection.watched & READ:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        if self._is_held_up:
            connection.held = True
            self._held.append(connection)
            self._watch(connection)
            return
        try:
            data = connection.socket.recv(min(CHUNK, connection.credit))
        except BlockingIOError:
            return
        except OSError:
            self._break(connection)
            return
        connection.credit -= len(data)
        connection.reading = bool(data)
        self._send(connection, "data" if data else "end", data)
        self._watch(connection)

    def _write(self, connection: _Connection) -> None:
        """Give the worker what it takes now, then what comes behind it."""
        try:
            if connection.waiting:
                size = connection.socket.send(connection.waiting)
                del connection.waiting[:size]
                connection.taken += size
            if connection.ending == "end" and not connection.waiting:
                connection.ending = ""
                connection.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._break(connection)
            return
        if connection.ending == "close" and not connection.waiting:
            self._forget(connection)
            return
        if connection.taken >= WINDOW // 4:
            self._send(connection, "credit", bytes=connection.taken)
            connection.taken = 0
        self._watch(connection)

    def _break(self, connection: _Connection) -> None:
        """The worker has reset the connection."""
        if connection.ending != "close":
            self._send(connection, "close")
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        if connection.watched:
            self._selector.unregister(connection.socket)
        connection.watched = 0
        connection.reading = False
        connection.waiting.clear()
        connection.socket.close()
        del self._connections[connection.number]
        self._room = self._most


def _is_ours(peer: Tuple[str, int], here: Tuple[str, int]) -> bool:
    """Whether a program of this user, or of root, holds the other end (sock_diag(7)); one that is closed has no inode."""
    head = struct.pack("=IHHIIBBHI", 72, 20, 1, 0, 0, socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    ends = peer[1], here[1], socket.inet_aton(peer[0]), socket.inet_aton(here[0])
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.send(head + struct.pack("!HH4s12x4s16x8s", *ends, b"\xff" * 8))
            uid, inode = struct.unpack_from("=II", kernel.recv(4096), _OWNER)
    except (OSError, struct.error):
        return False
    return inode != 0 and uid in (0, os.geteuid())
