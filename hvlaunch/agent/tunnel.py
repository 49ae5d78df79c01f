"""A tunnel from rank 0 to a service on each other host, such as llama.cpp's RPC server, which has no protection of its own.

The service listens on 127.0.0.1. An Exit on its host takes TLS connections that know the job's secret; an Entrance on rank 0's
host is a port of 127.0.0.1 for programs of the same user. The text is part of services.py's program.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Union

    Side = Union[socket.socket, ssl.SSLSocket]

__all__ = ["Entrance", "Exit", "is_own", "join"]

_GREETING = 3.0
"""Seconds for a connection, a handshake and the secret: a stranger holds a thread no longer."""
_MOST = 256
"""Connections at a time: strangers must not use up the host's threads."""
_PIECE = 1 << 18
_LOOKS = 20
_READY = b"+"
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Exit:
    """Passes connections with the secret of `keys` on to a port of this host."""

    def __init__(self, keys: Dict[str, str], port: int, service: int, folder: str) -> None:
        """Raises OSError."""
        self._secret = keys["secret"].encode("ascii")
        self._service = "127.0.0.1", service
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        path = os.path.join(folder, "tunnel.%d.pem" % os.getpid())
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(keys["pem"])
        try:
            self._context.load_cert_chain(path)
        finally:
            os.unlink(path)
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
        _serve(listener, self._pass_on)

    def _pass_on(self, connection: socket.socket) -> None:
        connection.settimeout(_GREETING)
        with self._context.wrap_socket(connection, server_side=True) as peer:
            # One record of TLS, as it was sent.
            if not hmac.compare_digest(peer.recv(len(self._secret)), self._secret):
                return
            with socket.create_connection(self._service, _GREETING) as service:
                peer.sendall(_READY)
                join(peer, service)


class Entrance:
    """A port of 127.0.0.1 that leads to the service behind the Exit at `address`, for programs of this user."""

    def __init__(self, keys: Dict[str, str], address: str) -> None:
        self._keys = keys
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        # Pinned in _dial(): the certificate is the job's own, and no authority knows it.
        self._context.verify_mode = ssl.CERT_NONE
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        _serve(listener, self._pass_on)

    def is_open(self) -> bool:
        """True if the service answers."""
        try:
            self._dial().close()
        except OSError:
            return False
        return True

    def _pass_on(self, connection: socket.socket) -> None:
        # Every user of this host can connect to its 127.0.0.1.
        if is_own(connection):
            with self._dial() as peer:
                join(peer, connection)

    def _dial(self) -> ssl.SSLSocket:
        """Return a connection to the service. Raises OSError."""
        with socket.create_connection(self._address, _GREETING) as plain:
            peer = self._context.wrap_socket(plain)
        try:
            self._greet(peer)
        except BaseException:
            peer.close()
            raise
        return peer

    def _greet(self, peer: ssl.SSLSocket) -> None:
        """Prove that both ends know the job's keys. Raises ConnectionError."""
        certificate = "sha256:" + hashlib.sha256(peer.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(certificate, self._keys["fingerprint"]):
            raise ConnectionError("another program")
        peer.sendall(self._keys["secret"].encode("ascii"))
        if peer.recv(1) != _READY:
            raise ConnectionError("no service")


def _serve(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    """Call `answer` in a thread for each connection, until the process ends."""
    free = threading.Semaphore(_MOST)

    def handle(connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                answer(connection)
        except (OSError, ValueError):
            pass  # the program at the other end sees the end of its connection
        finally:
            free.release()

    def accept() -> None:
        while True:
            free.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                # Too many open files, for example: others are closed soon.
                free.release()
                time.sleep(0.1)
                continue
            threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


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
