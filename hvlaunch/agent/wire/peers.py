"""Connections between hosts of a job by TLS: both ends know the job's certificate and secret (rendezvous/serving/certificate.py).

The caller checks the certificate before it sends the secret; the listener answers only with the secret. The text stands alone, as
part of the program of a preset's services.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Sequence, Tuple

__all__ = ["PeerServer", "dial", "exactly", "serve"]

_CONNECTING = 3.0
_SILENCE = 15.0
"""Seconds without a byte after which the other end is given up."""
_GREETING = 3.0
"""Seconds for a peer's handshake and secret: a stranger holds one of the places no longer."""
_MOST_PEERS = 4
_SECRET_SIZE = 64


def exactly(connection: ssl.SSLSocket, size: int, deadline: float = float("inf")) -> bytes:
    data = bytearray()
    while len(data) < size:
        if time.monotonic() > deadline:
            raise EOFError
        more = connection.recv(min(size - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def serve(listener: socket.socket, answer: Callable[[socket.socket], None], most: int) -> None:
    """Call `answer` in a thread for each connection until the process ends, for at most so many at a time."""
    free = threading.Semaphore(most)

    def handle(connection: socket.socket) -> None:
        try:
            with connection:
                answer(connection)
        except (OSError, EOFError, ValueError):
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


class PeerServer:
    """Accepts hosts with the job's secret until the process ends, and calls `answer` for each in a thread."""

    def __init__(
        self,
        secret: str,
        pem: str,
        folder: str,
        answer: Callable[[ssl.SSLSocket], None],
        *,
        port: int = 0,
        most: int = _MOST_PEERS,
    ) -> None:
        """The private key is in `folder` for a moment; 0 is any free port. Raises OSError."""
        self._secret = secret.encode("ascii")
        self._answer = answer
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        path = os.path.join(folder, "key.%d.pem" % os.getpid())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, pem.encode("ascii"))
            self._context.load_cert_chain(path)
        finally:
            os.close(descriptor)
            os.unlink(path)
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6)
        self.port: int = listener.getsockname()[1]
        serve(listener, self._serve, most)

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_GREETING)
        with self._context.wrap_socket(connection, server_side=True) as peer:
            if hmac.compare_digest(exactly(peer, _SECRET_SIZE), self._secret):
                peer.settimeout(_SILENCE)
                self._answer(peer)


def dial(addresses: Sequence[Tuple[str, int]], secret: str, fingerprint: str) -> Optional[ssl.SSLSocket]:
    """Return a connection to the first address with an answer, after the secret; None without an answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # Pinned below: the certificate is the job's own, and no authority knows it.
    context.verify_mode = ssl.CERT_NONE
    for address in addresses:
        peer = None
        try:
            plain = socket.create_connection((address[0], address[1]), _CONNECTING)
            plain.settimeout(_SILENCE)
            peer = context.wrap_socket(plain)
            certificate = peer.getpeercert(binary_form=True) or b""
            if hmac.compare_digest("sha256:" + hashlib.sha256(certificate).hexdigest(), fingerprint):
                peer.sendall(secret.encode("ascii"))
                return peer
        except (OSError, ValueError):
            pass
        if peer is not None:
            peer.close()
    return None
