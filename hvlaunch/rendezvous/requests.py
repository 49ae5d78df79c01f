"""Requests to a server over kept connections: TLS with a pinned certificate, timeouts, and repetition."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import time
from collections import deque
from functools import cache
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from hvlaunch.rendezvous.client_errors import BadCertificate, NoRendezvous, RendezvousUnreachable

__all__ = [
    "PinnedConnection",
    "Reply",
    "Requests",
    "WrongCertificate",
    "is_loopback",
    "keep_alive",
    "read_pin",
]

_PAUSES = (0.05, 0.2, 0.5)
"""Seconds before the next try after a reset: in a crowd of unauthenticated clients, a server drops connections."""


class Reply(NamedTuple):
    """An answer; `etag` is the field's value without quotes, "" if missing."""

    status: int
    body: bytes
    etag: str


class Requests:
    """Sends requests to url (`https://HOST:PORT`, IPv6 in brackets) with a token, from any number of threads.

    pin: the fingerprint of the server's certificate. `http://` is for servers on this machine alone, and needs none.
    timeout: seconds for a connection to be made, and for an answer to come. Connections are kept and
    used again, by one thread at a time; a kept one that proves dead is replaced once, so every request must be
    one that may be repeated. It goes where url says and nowhere else: no proxy, no redirect.

    Raises NoRendezvous where url or token can't be one, and where the token would travel in the clear.
    """

    def __init__(self, url: str, token: str, pin: str | None, timeout: float) -> None:
        scheme, self._host, self._port = _address(url)
        self._pin = pin if scheme == "https" else None
        if scheme == "https" and pin is None:
            raise NoRendezvous(
                "the fingerprint of its certificate is not known", url=url, hint="HVLAUNCH_RENDEZVOUS_CERT"
            )
        if scheme == "http" and not is_loopback(self._host):
            raise NoRendezvous(
                "the token would be readable on the network", url=url, hint="https:// and its certificate"
            )
        # A token with a line break could add header fields.
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise NoRendezvous("the token must be one word of printable ASCII characters", url=url)
        self._url = url
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"}
        # The newest first: old connections may have been closed by a firewall.
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()

    def ask(self, method: str, path: str, body: bytes | None = None, patience: float = 0.0) -> Reply:
        """Send a request and return the answer, whatever its status. `patience` is added to the timeout.

        Raises RendezvousUnreachable.
        """
        connection = self._kept()
        if connection is not None:
            try:
                return self._exchange(connection, method, path, body, patience)
            # A server may have closed an idle connection just before the request.
            except (ConnectionError, ssl.SSLError):
                # The other kept connections are most likely dead too.
                self.close()
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
        for pause in (*_PAUSES, None):
            connection = self._new()
            try:
                return self._exchange(connection, method, path, body, patience)
            except (OSError, http.client.HTTPException) as error:
                if pause is None or not isinstance(error, ConnectionResetError | BrokenPipeError):
                    raise self._unreachable(error) from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _new(self) -> http.client.HTTPConnection:
        if self._pin is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return PinnedConnection(self._host, self._port, self._pin, self._timeout)

    def _kept(self) -> http.client.HTTPConnection | None:
        # After a fork, the connections are the parent's: requests of both processes would mix on
        # one connection.
        if self._process != os.getpid():
            self._process = os.getpid()
            self.close()
        # No lock: pop() of a deque is atomic, and another thread may take the last connection first.
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        patience: float,
    ) -> Reply:
        try:
            if connection.sock is None:
                # Connected here, so that keepalive is set before the first wait.
                self._connect(connection)
            # A long poll is answered up to `patience` seconds later than other requests.
            connection.sock.settimeout(self._timeout + patience)
            connection.request(method, path, body=body, headers=self._headers)
            response = connection.getresponse()
            reply = _read(response)
        # An interrupted exchange leaves a part of its answer in the connection: a later request
        # would read it.
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        return reply

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        connection.connect()
        keep_alive(connection.sock)

    def _unreachable(self, error: Exception) -> RendezvousUnreachable:
        hint = None
        if isinstance(error, TimeoutError):
            cause = f"no answer within {self._timeout:g} s"
        elif isinstance(error, WrongCertificate):
            cause, hint = str(error), "check that HVLAUNCH_RENDEZVOUS_CERT is this job's"
        elif isinstance(error, ssl.SSLError):
            cause = f"TLS failed ({(error.reason or str(error)).lower().replace('_', ' ')})"
        elif isinstance(error, OSError):
            cause = error.strerror or str(error)
        else:
            cause = "the answer is incomplete, or is not HTTP"
        return RendezvousUnreachable(cause, url=self._url, hint=hint)


def _read(response: http.client.HTTPResponse) -> Reply:
    """Raises IncompleteRead."""
    # Each complete head ends with the length. http.client takes a head cut off by the end of the
    # connection for a complete one.
    if response.length is None:
        raise http.client.IncompleteRead(b"")
    return Reply(response.status, response.read(), (response.getheader("ETag") or "").strip('"'))


def is_loopback(host: str) -> bool:
    """True if the name or address means this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    else:
        if (
            parts.scheme not in ("http", "https")
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            host = None
    if not host or not port:
        # The part before may be a password.
        shown = url.rpartition("@")[2]
        raise NoRendezvous(f"{shown!r} is not the address of a rendezvous", hint="https://HOST:PORT")
    return parts.scheme, unquote(host), port


_EVERY = 3


def keep_alive(sock: socket.socket, *, times: int = 100) -> None:
    """Let the kernel probe the other end every 3 s; reads and writes fail after `times` lost probes, or a reset.

    A firewall may have dropped the connection at the other end alone: a waiting client would never notice.
    """
    # macOS lacks these options.
    if not hasattr(socket, "TCP_KEEPIDLE"):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _EVERY),
        (socket.TCP_KEEPINTVL, _EVERY),
        (socket.TCP_KEEPCNT, times),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


_PIN = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LONGEST = 64 << 10


class WrongCertificate(OSError):
    """Another server answers at the address."""


class PinnedConnection(http.client.HTTPConnection):
    """HTTPS to a server with the certificate of fingerprint `pin`, which is checked before the first request."""

    def __init__(self, host: str, port: int, pin: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._pin = pin

    def connect(self) -> None:
        """Raises WrongCertificate."""
        super().connect()
        try:
            self.sock = _context().wrap_socket(self.sock)
            # Before http.client sends the first head: no other server may get the token.
            _check(self.sock, self._pin)
        except BaseException:
            self.close()
            raise


def _check(sock: ssl.SSLSocket, pin: str) -> None:
    """Raises WrongCertificate."""
    shown = sock.getpeercert(binary_form=True) or b""
    if not compare_digest("sha256:" + hashlib.sha256(shown).hexdigest(), pin):
        raise WrongCertificate("its certificate is not the expected one")


def read_pin(text: str) -> str:
    """Return the fingerprint in `text`: `sha256:` and 64 hexadecimal digits, or the name of a certificate's file.

    Raises BadCertificate.
    """
    match = _PIN.fullmatch(text)
    if match is not None:
        return "sha256:" + match[1].lower()
    try:
        with Path(text).open("rb") as reader:
            content = reader.read(_LONGEST).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadCertificate(f"certificate {text}: {cause}") from error
    try:
        der = ssl.PEM_cert_to_DER_cert(content.strip())
    except ValueError as error:
        raise BadCertificate(f"certificate {text}: not a certificate in PEM") from error
    return "sha256:" + hashlib.sha256(der).hexdigest()


@cache
def _context() -> ssl.SSLContext:
    """Return a context without authorities: a fingerprint says more than any signature.

    TLS 1.3 proves in each handshake possession of the certificate's key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
