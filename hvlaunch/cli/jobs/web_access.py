"""Access to a job's page: a token admits one browser, which then shows a cookie and a key."""

import hmac
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Access", "Admission", "Refusal", "has_bearer"]

_LIFE = 600.0
"""Seconds in which a token must be used."""
_OWN_NAMES = frozenset(("127.0.0.1", "localhost", "[::1]"))
_BEARER = "Bearer "


class Refusal(NamedTuple):
    """The answer to a request that is not allowed."""

    status: int
    reason: str


class Admission(NamedTuple):
    """A browser's secrets. `cookie` is the value of a Set-Cookie field."""

    cookie: str
    key: str


class Access:
    """Checks requests by their header fields, whose names are in small letters.

    A browser shows two secrets. Scripts can't read the cookie, and the browser sends the key to no other port: browsers
    send cookies to every port of a machine, and therefore to the servers of its other users.
    """

    def __init__(
        self,
        job: str,
        address: str,
        port: int,
        *,
        is_tls: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The page of `job` is served at `address` and `port`. `clock` is in seconds."""
        # With the port: the same job may be served twice, and cookies are shared by all ports of a machine.
        self._cookie_name = f"hvlaunch_{job}_{port}"
        self._secure = "; Secure" if is_tls else ""
        self._names = _OWN_NAMES | {f"[{address}]" if ":" in address else address}
        self._cookie = os.urandom(32).hex()
        self._key = os.urandom(32).hex()
        self._clock = clock
        self._tokens: dict[str, float] = {}

    def new_token(self) -> str:
        """Make a token for one browser."""
        token = os.urandom(16).hex()
        self._tokens[token] = self._clock() + _LIFE
        return token

    def refusal(self, fields: Mapping[str, str], *, is_public: bool) -> Refusal | None:
        """Return why such a request gets no answer, or None. Other sites may link to public files."""
        host = fields.get("host", "")
        # DNS rebinding: another site's name may lead here.
        if _without_port(host) not in self._names:
            return Refusal(421, "the request names another host than this server")
        origin = fields.get("origin")
        is_foreign = origin is not None and origin not in (f"http://{host}", f"https://{host}")
        is_from_elsewhere = fields.get("sec-fetch-site", "none") not in ("same-origin", "none")
        if is_foreign or (is_from_elsewhere and not is_public):
            return Refusal(403, "requests from other sites are refused")
        return None

    def is_let_in(self, fields: Mapping[str, str]) -> bool:
        """Check the cookie and the key of a request."""
        pairs = [part.strip().partition("=") for part in fields.get("cookie", "").split(";")]
        cookies = [value for name, _, value in pairs if name == self._cookie_name]
        has_cookie = any(_is_same(value, self._cookie) for value in cookies)
        return has_bearer(fields, self._key) and has_cookie

    def let_in(self, fields: Mapping[str, str]) -> Admission | None:
        """Take the token of a request; None for a wrong, used or expired token."""
        shown = fields.get("authorization", "").removeprefix(_BEARER)
        token = next((token for token in self._tokens if _is_same(token, shown)), None)
        # pop() first: a token is good once, even if it is too old.
        if token is None or self._tokens.pop(token) <= self._clock():
            return None
        # HttpOnly hides the cookie from scripts, and SameSite from requests of other sites.
        cookie = f"{self._cookie_name}={self._cookie}; HttpOnly; SameSite=Strict; Path=/{self._secure}"
        return Admission(cookie, self._key)


def has_bearer(fields: Mapping[str, str], token: str) -> bool:
    """Check that a request shows this bearer token."""
    return _is_same(fields.get("authorization", ""), _BEARER + token)


def _is_same(shown: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode(errors="replace"), secret.encode())


def _without_port(host: str) -> str:
    """Remove the port, which differs for a browser behind `ssh -L`."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.startswith("[")) else host
