"""A client of the rendezvous: blocking, thread-safe, and nothing but the standard library."""

from __future__ import annotations

import http.client
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from hvlaunch.rendezvous.errors import (
    NoRendezvous,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    StoreFull,
    Unauthorized,
    UnexpectedAnswer,
    ValueTooLarge,
    WaitTimeout,
)

__all__ = ["Client"]

_LONGEST_POLL = 30.0
"""Seconds that one request of a longer wait lasts, so that what sits between sees traffic."""

_REFUSALS: dict[int, tuple[type[RendezvousError], str | None]] = {
    401: (Unauthorized, "check that HVLAUNCH_TOKEN is this job's"),
    413: (ValueTooLarge, None),
    503: (RendezvousClosed, None),
    507: (StoreFull, None),
}


class _Reply(NamedTuple):
    status: int
    body: bytes


class Client:
    """Speaks to the server at url (`http://HOST:PORT`, IPv6 in brackets) with the job's token.

    timeout: seconds for a connection to be made, and for an answer to come. Connections are kept and
    used again, by one thread at a time; a kept one that proves dead is replaced once, which is safe since
    every request here may be repeated. It goes where url says and nowhere else: no proxy, no redirect.

    Every method raises RendezvousUnreachable, RendezvousClosed, Unauthorized or UnexpectedAnswer.
    """

    def __init__(self, url: str, token: str, *, timeout: float = 10.0) -> None:
        self._host, self._port = _address(url)
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise NoRendezvous("the token is no printable ASCII word", url=url)
        self.url = url
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"}
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._process = os.getpid()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, *, timeout: float = 10.0) -> Client:
        """The client that a worker's HVLAUNCH_RENDEZVOUS and HVLAUNCH_TOKEN describe.

        Raises NoRendezvous where one of them is missing or malformed.
        """
        for name in ("HVLAUNCH_RENDEZVOUS", "HVLAUNCH_TOKEN"):
            if not environ.get(name):
                raise NoRendezvous(f"{name} is not set", hint="start this program with hvlaunch")
        return cls(environ["HVLAUNCH_RENDEZVOUS"], environ["HVLAUNCH_TOKEN"], timeout=timeout)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def __enter__(self) -> Client:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, scope: str, key: str) -> bytes | None:
        """The value, or None where the key is not set."""
        reply = self._ask("GET", _path(scope, key))
        return reply.body if reply.status == http.client.OK else None

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Set the key. Raises ValueTooLarge and StoreFull, too."""
        path = _path(scope, key)
        if self._ask("PUT", path, value).status != http.client.OK:
            raise UnexpectedAnswer(http.client.NOT_FOUND, url=self.url)

    def delete(self, scope: str, key: str) -> None:
        """Forget the key, if it is set."""
        self._ask("DELETE", _path(scope, key))

    def wait(self, scope: str, key: str, timeout: float) -> bytes:
        """The value, as soon as there is one. Raises WaitTimeout after `timeout` seconds without."""
        deadline = time.monotonic() + timeout
        while True:
            poll = min(max(deadline - time.monotonic(), 0.0), _LONGEST_POLL)
            reply = self._ask("GET", f"/-/get{_path(scope, key)}?wait={poll:.3f}", patience=poll)
            if reply.status == http.client.OK:
                return reply.body
            if time.monotonic() >= deadline:
                raise WaitTimeout(scope, key, timeout, url=self.url)

    def close(self) -> None:
        """Close the connections that are not in use. The client stays usable."""
        while self._idle:
            self._idle.pop().close()

    def _ask(self, method: str, path: str, body: bytes | None = None, *, patience: float = 0.0) -> _Reply:
        """One request; the reply is 200 or 404, everything else is raised. patience is added to the timeout."""
        connection = self._kept()
        if connection is not None:
            try:
                return self._exchange(connection, method, path, body, patience)
            except ConnectionError:
                self.close()  # what was kept with it is most likely as dead
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)
        try:
            return self._exchange(connection, method, path, body, patience)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _kept(self) -> http.client.HTTPConnection | None:
        if self._process != os.getpid():  # after a fork: the connections are the parent's
            self._process = os.getpid()
            self.close()
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
    ) -> _Reply:
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(self.timeout + patience)
            connection.request(method, path, body=body, headers=self._headers)
            response = connection.getresponse()
            reply = _Reply(response.status, response.read())
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        return self._accepted(reply)

    def _accepted(self, reply: _Reply) -> _Reply:
        if reply.status in (http.client.OK, http.client.NOT_FOUND):
            return reply
        if reply.status not in _REFUSALS:
            raise UnexpectedAnswer(reply.status, url=self.url)
        kind, hint = _REFUSALS[reply.status]
        raise kind(reply.body[:500].decode(errors="replace").strip(), url=self.url, hint=hint)

    def _unreachable(self, error: Exception) -> RendezvousUnreachable:
        if isinstance(error, TimeoutError):
            cause = f"no answer within {self.timeout:g} s"
        elif isinstance(error, OSError):
            cause = error.strerror or str(error)
        else:
            cause = "the answer breaks off, or is no HTTP"
        return RendezvousUnreachable(cause, url=self.url)


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    else:
        if (
            parts.scheme != "http"
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
            or "@" in parts.netloc
        ):
            host = None
    if not host or not port:
        shown = url.rpartition("@")[2]  # what is before it may be a password
        raise NoRendezvous(f"{shown!r} is no address of a rendezvous", hint="http://HOST:PORT")
    return unquote(host), port


def _path(scope: str, key: str) -> str:
    if not scope or not key or scope == "-":
        raise ValueError(f"no place in the store: {scope!r}, {key!r}")
    return f"/{quote(scope, safe='')}/{quote(key, safe='')}"
