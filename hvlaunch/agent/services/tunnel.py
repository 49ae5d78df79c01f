"""A tunnel from rank 0 to a service on each other host, such as the unprotected RPC server of llama.cpp.

The service listens on 127.0.0.1. An Exit on its host takes connections of the job's hosts (wire/peers.py); an Entrance on rank
0's host is a port of 127.0.0.1 for programs of the same user. The text is part of the services' program, behind that of wire/peers.py.
"""

from __future__ import annotations

import os
import select
import socket
import ssl

from hvlaunch.agent.wire.peers import PeerServer, dial, serve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Union

    Side = Union[socket.socket, ssl.SSLSocket]

__all__ = ["Entrance", "Exit", "is_own", "join"]

_ANSWER = 3.0
"""Seconds for the service's side to answer."""
_MOST = 256
"""Connections at a time: strangers must not use up the host's threads."""
_PIECE = 1 << 18
_LOOKS = 20
_READY = b"+"
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Exit:
    """Passes connections of hosts with these keys on to a port of this host."""

    def __init__(self, keys: Dict[str, str], port: int, service: int, folder: str) -> None:
        """Raises OSError."""
        self._service = "127.0.0.1", service
        PeerServer(keys["secret"], keys["pem"], folder, self._pass_on, port=port, most=_MOST)

    def _pass_on(self, peer: ssl.SSLSocket) -> None:
        with socket.create_connection(self._service, _ANSWER) as service:
            peer.sendall(_READY)
            join(peer, service)


class Entrance:
    """A port of 127.0.0.1 that leads to the service behind the Exit at `address`, for programs of this user."""

    def __init__(self, keys: Dict[str, str], address: str) -> None:
        self._keys = keys
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        serve(listener, self._pass_on, _MOST)

    def is_open(self) -> bool:
        """True if the service answers."""
        try:
            self._connect().close()
        except OSError:
            return False
        return True

    def _pass_on(self, connection: socket.socket) -> None:
        # Every user of this host can connect to its 127.0.0.1.
        if is_own(connection):
            with self._connect() as peer:
                join(peer, connection)

    def _connect(self) -> ssl.SSLSocket:
        """Return a connection to the service. Raises OSError."""
        peer = dial([self._address], self._keys["secret"], self._keys["fingerprint"])
        if peer is None:
            raise ConnectionError("no answer")
        answer = b""
        try:
            peer.settimeout(_ANSWER)
            answer = peer.recv(1)
        finally:
            if answer != _READY:
                peer.close()
        if answer != _READY:
            raise ConnectionError("no service")
        return peer


def is_own(connection: socket.socket) -> bool:
    """True if the peer, a program of this host, is the same user's, by /proc/net/tcp (proc(5)). Raises OSError."""
    ends = [":%04X" % address[1] for address in (connection.getpeername(), connection.getsockname())]
    for _ in range(_LOOKS):
        with open("/proc/self/net/tcp") as file:
            lines = [line.split() for line in file]
        owners = {line[7] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1])}
        # The kernel may leave a line out while other connections come and go.
        if owners:
            return owners == {str(os.geteuid())}
    return False


def join(peer: ssl.SSLSocket, plain: socket.socket) -> None:
    """Pass bytes both ways until one side ends. Raises OSError."""
    # One thread for both ways: OpenSSL's connections may not be used by two at a time.
    waiting: Dict[Side, memoryview] = {peer: memoryview(b""), plain: memoryview(b"")}
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for side in waiting:
        side.setblocking(False)
    while True:
        has_moved = False
        for source, target in ((peer, plain), (plain, peer)):
            try:
                if not waiting[target]:
                    data = source.recv(_PIECE)
                    if not data:
                        return
                    waiting[target] = memoryview(data)
                waiting[target] = waiting[target][target.send(waiting[target]) :]
                has_moved = True
            except _AGAIN:  # noqa: PERF203 (each way for itself)
                pass
        if has_moved:
            continue
        poll = select.poll()
        for side, other in ((peer, plain), (plain, peer)):
            events = (select.POLLOUT if waiting[side] else 0) | (0 if waiting[other] else select.POLLIN)
            # A dead side without events would end the wait at once, again and again.
            if events:
                poll.register(side, events)
        poll.poll()
