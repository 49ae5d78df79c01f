"""A blocking, thread-safe client of the rendezvous, with the standard library only."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import math
import os
import random
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from hmac import compare_digest
from http.client import NOT_FOUND, OK, PRECONDITION_FAILED
from pathlib import Path
from secrets import token_hex
from urllib.parse import quote, unquote, urlsplit

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous import (
    BadCertificate,
    NoRendezvous,
    NotANumber,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    StoreFull,
    TooManyConnections,
    Unauthorized,
    UnexpectedAnswer,
    ValueTooLarge,
    WaitTimeout,
    messages,
)
from hvlaunch.rendezvous.messages import Changes

__all__ = [
    "Client",
    "PinnedConnection",
    "Reply",
    "Requests",
    "Versioned",
    "WrongCertificate",
    "is_loopback",
    "keep_alive",
    "read_lease",
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

    pin: the fingerprint of the server's certificate. `http://` is for servers on this machine alone, and needs no pin.
    timeout: seconds to make a connection, and seconds to wait for an answer. Connections are kept and
    used again, by a single thread at a time; a dead connection is replaced once, and its request is repeated.
    Therefore every request must be repeatable. No proxy and no redirect is followed.

    Raises NoRendezvous for a malformed url or token, and if the token would travel in the clear.
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


_LONGEST_POLL = 30.0
"""Seconds of each request in a longer wait, so firewalls on the way see traffic."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5
"""Seconds between two attempts to reach a silent server; a random part is cut off."""

_REFUSALS: dict[int, tuple[type[RendezvousError], str | None]] = {
    401: (Unauthorized, "check that HVLAUNCH_TOKEN is the token of this job"),
    409: (NotANumber, None),
    413: (ValueTooLarge, None),
    429: (TooManyConnections, None),
    503: (RendezvousClosed, None),
    507: (StoreFull, None),
}


class Versioned(NamedTuple):
    """A value (None: not set) and its version for compare_and_set."""

    value: bytes | None
    version: str


class Client:
    """Sends requests to the server at url (`https://HOST:PORT`, IPv6 in brackets) with the job's token.

    certificate: the server's, as a file (PEM) or its fingerprint (`sha256:` and 64 hexadecimal digits): no other server gets
    anything. A server on this machine itself (`http://127.0.0.1:PORT`) needs none; requests to others need one.
    timeout: seconds to make a connection, and seconds to wait for an answer. Connections are kept and used again,
    by one thread at a time. If a kept connection turns out to be closed, the request is sent once more on a new one;
    this is safe, since the server carries out no request twice. No proxy and no redirect is followed.
    lease: seconds for which a request is sent again and again while nobody answers, counted from the first failure; a wait is
    never longer for it than its own timeout. 0: it is not. So a job's workers do not notice that another driver took the job over.

    Every method may raise RendezvousUnreachable, RendezvousClosed, Unauthorized, TooManyConnections or
    UnexpectedAnswer; methods that set keys may also raise ValueTooLarge and StoreFull.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        certificate: str | None = None,
        timeout: float = 10.0,
        lease: float = 0.0,
    ) -> None:
        self._requests = Requests(url, token, read_pin(certificate) if certificate else None, timeout)
        self.url = url
        """The server's address."""
        self.timeout = timeout
        """Seconds to make a connection, and to wait for an answer."""
        self.lease = lease
        """Seconds for which a request is sent again while nobody answers."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, *, timeout: float = 10.0) -> Client:
        """The client for a worker's HVLAUNCH_RENDEZVOUS, HVLAUNCH_RENDEZVOUS_CERT, HVLAUNCH_TOKEN and HVLAUNCH_LEASE.

        Raises NoRendezvous if one of them is missing or malformed.
        """
        for name in ("HVLAUNCH_RENDEZVOUS", "HVLAUNCH_TOKEN"):
            if not environ.get(name):
                raise NoRendezvous(f"{name} is not set", hint="start this program with hvlaunch")
        certificate = environ.get("HVLAUNCH_RENDEZVOUS_CERT")
        url, token = environ["HVLAUNCH_RENDEZVOUS"], environ["HVLAUNCH_TOKEN"]
        return cls(url, token, certificate=certificate, timeout=timeout, lease=read_lease(environ))

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Client:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are not in use. The client stays usable."""
        self._requests.close()

    # One key:

    def get(self, scope: str, key: str) -> bytes | None:
        """Return the value; None if the key is not set."""
        reply = self._ask("GET", _path(scope, key))
        return reply.body if reply.status == OK else None

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Set the key."""
        self._do("PUT", _path(scope, key), value)

    def delete(self, scope: str, key: str) -> bool:
        """Delete the key; False if it was not set."""
        return self._ask("POST", _once("delete", scope, key), b"").status == OK

    def add(self, scope: str, key: str, amount: int) -> int:
        """Add to the value, a number in decimal digits (0 if the key is not set), and return the sum.

        Raises NotANumber if the value is not a number, or the sum has more than 64 bits.
        """
        return int(self._do("POST", _once("add", scope, key), b"%d" % amount).body)

    def append(self, scope: str, key: str, value: bytes) -> None:
        """Add `value` at the end of the key's value, which is empty if the key is not set."""
        self._do("POST", _once("append", scope, key), value)

    def read(self, scope: str, key: str) -> Versioned:
        """Return the value with its version; a missing key has a version too."""
        return _versioned(self._ask("GET", f"/-/read{_path(scope, key)}"))

    def compare_and_set(self, scope: str, key: str, value: bytes, version: str) -> tuple[bool, Versioned]:
        """Set the key if it still has this version; returns whether it was set, and its value and version now."""
        reply = self._ask("POST", f"{_once('compare', scope, key)}&version={quote(version, safe='')}", value)
        if reply.status == PRECONDITION_FAILED:
            return False, _versioned(reply)
        if reply.status != OK:
            raise UnexpectedAnswer(reply.status, url=self.url)
        return True, Versioned(value, reply.etag)

    # Many keys:

    def get_many(self, scope: str, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of one moment in the order of the keys; None for a key without a value."""
        reply = self._do("POST", f"/-/get-many{_path(scope)}", _list(keys))
        sizes, data = messages.split(reply.body)
        return messages.unpack(sizes, data)

    def put_many(self, scope: str, values: Mapping[str, bytes]) -> None:
        """Set all keys at once; if this raises, none is set."""
        head = [[key, len(value)] for key, value in values.items()]
        self._do("POST", f"/-/put-many{_path(scope)}", messages.pack(head, values.values()))

    def check(self, scope: str, keys: Sequence[str]) -> bool:
        """True if all keys are set."""
        return self._ask("POST", f"/-/check{_path(scope)}", _list(keys)).status == OK

    def keys(self, scope: str) -> list[str]:
        """Return the scope's keys, sorted."""
        return messages.read_keys(self._do("GET", f"/-/keys{_path(scope)}").body)

    def count(self, scope: str) -> int:
        """The number of keys in the scope."""
        return int(self._do("GET", f"/-/count{_path(scope)}").body)

    def delete_scope(self, scope: str) -> None:
        """Delete all keys of the scope."""
        self._do("DELETE", f"/-/scope{_path(scope)}")

    # Waiting:

    def wait(self, scope: str, key: str, timeout: float) -> bytes:
        """Wait until the key is set, and return its value. Raises WaitTimeout after `timeout` seconds."""
        reply = self._poll("GET", f"/-/get{_path(scope, key)}?", None, timeout)
        if reply.status != OK:
            raise WaitTimeout(scope, key, timeout, url=self.url)
        return reply.body

    def wait_all(self, scope: str, keys: Sequence[str], timeout: float) -> None:
        """Wait until all keys are set. Raises WaitTimeout after `timeout` seconds."""
        body = _list(keys)
        if self._poll("POST", f"/-/check{_path(scope)}?", body, timeout).status != OK:
            values = self.get_many(scope, keys)
            missing = [key for key, value in zip(keys, values, strict=True) if value is None]
            raise WaitTimeout(scope, ", ".join(missing[:3]), timeout, url=self.url)

    def watch(self, scope: str, key: str | None = None, *, since: int = 0, timeout: float) -> Changes:
        """Wait for changes in the scope, or of its key, after version `since`, and return them.

        Begin with since 0 for every key with a value. Then give the version of the last changes. After
        `timeout` seconds without a change, the result has no values.
        """
        path = f"/-/watch{_path(scope) if key is None else _path(scope, key)}"
        reply = self._poll("GET", f"{path}?since={since:d}&", None, timeout)
        if reply.status != OK:
            return Changes(int(reply.etag or since), {})
        head, data = messages.split(reply.body)
        keys = [key for key, _ in head["keys"]]
        values = messages.unpack([size for _, size in head["keys"]], data)
        return Changes(head["version"], dict(zip(keys, values, strict=True)), head["complete"])

    # Asking:

    def _poll(self, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
        """Repeat a waiting request until the answer is not 404, or until `timeout` seconds have passed."""
        deadline = time.monotonic() + timeout
        tries = _Tries(self.lease, deadline)
        while True:
            # The server waits, and not this client: a poll is a single request of up to 30 s.
            # An expired deadline still asks once: a timeout of 0 reads the state of now.
            poll = min(max(deadline - time.monotonic(), 0.0), _LONGEST_POLL)
            try:
                reply = self._ask_once(method, f"{path}wait={poll:.3f}", body, poll)
            except RendezvousUnreachable as error:
                tries.pause(error)
                continue
            if reply.status != NOT_FOUND or time.monotonic() >= deadline:
                return reply
            # The server answered, so its lease begins anew with the next failure.
            tries = _Tries(self.lease, deadline)

    def _do(self, method: str, path: str, body: bytes | None = None) -> Reply:
        reply = self._ask(method, path, body)
        if reply.status != OK:
            raise UnexpectedAnswer(reply.status, url=self.url)
        return reply

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        tries = _Tries(self.lease)
        while True:
            try:
                return self._ask_once(method, path, body)
            except RendezvousUnreachable as error:  # noqa: PERF203 (an attempt each)
                tries.pause(error)

    def _ask_once(self, method: str, path: str, body: bytes | None, patience: float = 0.0) -> Reply:
        reply = self._requests.ask(method, path, body, patience)
        if reply.status in (OK, NOT_FOUND, PRECONDITION_FAILED):
            return reply
        if reply.status not in _REFUSALS:
            raise UnexpectedAnswer(reply.status, url=self.url)
        kind, hint = _REFUSALS[reply.status]
        # The body's first bytes only: another server at this address may send anything.
        raise kind(reply.body[:500].decode(errors="replace").strip(), url=self.url, hint=hint)


class _Tries:
    """Pauses between attempts of one request, until `lease` seconds without an answer, or `deadline`."""

    def __init__(self, lease: float, deadline: float = math.inf) -> None:
        self._lease = lease
        self._deadline = deadline
        self._until: float | None = None
        self._longest = _FIRST_PAUSE

    def pause(self, error: RendezvousUnreachable) -> None:
        """Wait before the next attempt; raise `error` after the last."""
        now = time.monotonic()
        if self._until is None:
            self._until = min(now + self._lease, self._deadline)
        # A wrong certificate stays wrong: trying again would only hide an attack or a mistake.
        if now >= self._until or isinstance(error.__cause__, WrongCertificate):
            raise error
        pause = self._longest * random.uniform(0.5, 1.0)  # noqa: S311 (not all workers at once)
        self._longest = min(2 * self._longest, _LONGEST_PAUSE)
        time.sleep(min(pause, self._until - now))


def read_lease(environ: Mapping[str, str]) -> float:
    """Return HVLAUNCH_LEASE in seconds; 0 if it is not set. Raises NoRendezvous."""
    text = environ.get("HVLAUNCH_LEASE") or "0"
    try:
        lease = float(text)
    except ValueError:
        lease = math.nan
    # NaN fails each comparison, so that a malformed text ends here too.
    if not 0 <= lease < math.inf:
        raise NoRendezvous(f"HVLAUNCH_LEASE is {text!r}, which is not a number of seconds")
    return lease


def _path(scope: str, *key: str) -> str:
    if not scope or "" in key or scope == "-":
        raise ValueError(f"scope {scope!r}, key {key!r}: neither may be empty, and '-' is not a scope")
    return "".join(f"/{quote(name, safe='')}" for name in (scope, *key))


def _once(verb: str, scope: str, key: str) -> str:
    """Return the path of a request with an id: the server executes repeated copies once."""
    return f"/-/{verb}{_path(scope, key)}?id={token_hex(12)}"


def _list(keys: Sequence[str]) -> bytes:
    if "" in keys:
        raise ValueError("a key must not be empty")
    return messages.pack(list(keys))


def _versioned(reply: Reply) -> Versioned:
    if not reply.etag:
        raise UnexpectedAnswer(reply.status, url="")
    return Versioned(None if reply.etag == "0" else reply.body, reply.etag)
