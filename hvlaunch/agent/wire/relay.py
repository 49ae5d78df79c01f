"""Workers' connections to the rendezvous, carried in frames if this host can't reach the driver's port.

Data flows by credit: at most RELAY_WINDOW bytes of a connection are on their way in either direction, so neither a slow
worker nor a slow driver makes memory grow.
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

_HELD = 8  # frames waiting for the channel, beyond which workers are not read
_SOCK_DIAG = 4
_OWNER = 80  # offset of uid and inode in its answer


class _Connection:
    """A worker's connection. `waiting` has bytes for the worker; `ending` is the driver's `end` or `close` behind them."""

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

    `relay` frames have the connection's number `id` and a kind `what`: `open` (by the agent only), `data` (body: bytes),
    `end` (no more data from this side), `close` (the connection is over; earlier data still counts), `credit` (`bytes`
    were passed on).
    """

    def __init__(self, channel: DriverChannel, selector: Selector) -> None:
        self._channel = channel
        self._selector = selector
        self._connections: Dict[int, _Connection] = {}
        self._opened = 0
        self._held: List[_Connection] = []
        self._listener = socket.socket()
        self._shut = True
        # At most half of the file descriptors, so that connections can't keep workers from starting.
        self._most = self._room = min(MOST_RELAYED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def listen(self) -> int:
        """Listen for workers on 127.0.0.1; return the port. Raises OSError."""
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self._listener.setblocking(False)
        port: int = self._listener.getsockname()[1]
        return port

    def obey(self, header: Dict[str, Any], body: bytes) -> None:
        """Carry out a `relay` frame. Raises BadFrame for data beyond the window."""
        # A frame for an unknown connection is no error: the connection ended here while the frame was on its way.
        connection = self._connections.get(header["id"])
        if connection is None:
            return
        kind = header["what"]
        if kind == "data":
            if len(connection.waiting) + len(body) > WINDOW:
                raise BadFrame("relayed data beyond the window")
            connection.waiting += body
        elif kind == "credit":
            connection.credit += header["bytes"]
        else:
            connection.ending = kind
            connection.reading = connection.reading and kind != "close"
        self._write(connection)

    def read_on(self) -> None:
        """Continue once the channel has room: accept workers, and read from connections that were held back."""
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
        """Close all connections and stop listening: the driver is gone."""
        self._most = self._room = 0
        self._shut_out()
        self._listener.close()
        self._hang_up()

    def begin_epoch(self) -> None:
        """Close all connections: a successor does not know them."""
        self._hang_up()
        self._opened = 0

    def _hang_up(self) -> None:
        for connection in list(self._connections.values()):
            self._forget(connection)

    @property
    def _is_held_up(self) -> bool:
        return self._channel.relayed_frames >= _HELD

    def _send(self, connection: _Connection, kind: str, body: bytes = b"", **more: int) -> None:
        header = {"type": "relay", "id": connection.number, "what": kind, **more}
        self._channel.send(header, body, relayed=True)

    def _accept(self) -> None:
        """Accept a connection; half of the places are reserved for programs of this user and root."""
        if self._shut or self._is_held_up:
            self._shut_out()
            return
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no file descriptor is left
            # Until a connection ends, the listener would be ready again and again, and accept() fail.
            self._room = len(self._connections)
            self._shut_out()
            return
        # Any user of the host can connect to a loopback port: another user must not take all places.
        if len(self._connections) >= self._most // 2 and not _is_ours(peer, sock.getsockname()):
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Numbers are never used twice, so a late frame can't reach a newer connection.
        self._opened += 1
        connection = self._connections[self._opened] = _Connection(self._opened, sock)
        self._send(connection, "open")
        self._watch(connection)
        if len(self._connections) == self._most:
            self._shut_out()

    def _shut_out(self) -> None:
        """Leave further connections in the kernel's queue, until read_on() finds room."""
        if not self._shut:
            self._selector.unregister(self._listener)
        self._shut = True

    def _watch(self, connection: _Connection) -> None:
        """Watch for the next possible step: writing, reading with credit, or neither."""
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
        # Reserved before sending: the driver returns the credit once the bytes are passed on.
        connection.credit -= len(data)
        connection.reading = bool(data)
        self._send(connection, "data" if data else "end", data)
        self._watch(connection)

    def _write(self, connection: _Connection) -> None:
        """Write as much as the worker takes, then carry out the ending behind it."""
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
        # In quarters of the window: fewer frames, and the driver never runs out of credit.
        if connection.taken >= WINDOW // 4:
            self._send(connection, "credit", bytes=connection.taken)
            connection.taken = 0
        self._watch(connection)

    def _break(self, connection: _Connection) -> None:
        """Report a connection that the worker has reset."""
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
    """True if a program of this user, or of root, holds the other end, by sock_diag(7); a closed socket has no inode."""
    head = struct.pack("=IHHIIBBHI", 72, 20, 1, 0, 0, socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    ends = peer[1], here[1], socket.inet_aton(peer[0]), socket.inet_aton(here[0])
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.send(head + struct.pack("!HH4s12x4s16x8s", *ends, b"\xff" * 8))
            uid, inode = struct.unpack_from("=II", kernel.recv(4096), _OWNER)
    except (OSError, struct.error):
        return False
    return inode != 0 and uid in (0, os.geteuid())
