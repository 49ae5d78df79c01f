"""Who may see a job's page in a browser: by a token that is good once, and then by a cookie and a key."""

import hmac
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch.rendezvous.serving.http import Answer, Head
from hvlaunch.rendezvous.serving.wire import is_loopback

__all__ = ["PAGE_FILE", "Access", "Place", "Secrets", "load", "save"]

PAGE_FILE = "page.json"

_LIFE = 600.0
"""Seconds in which a token must be used."""
_MOST_TOKENS = 64
_OWN_NAMES = frozenset((b"127.0.0.1", b"localhost", b"[::1]"))
_BEARER = b"Bearer "


class Place(NamedTuple):
    """Where the page is served. `is_open` lets browsers on other machines in that come without TLS."""

    address: str
    port: int
    is_open: bool


class Secrets(NamedTuple):
    """A browser that was let in once shows cookie and key: no script can read the one, no other port is sent the other.

    Who scrapes metrics shows `scrape`, which is good for nothing else.
    """

    cookie: str
    key: str
    scrape: str

    @classmethod
    def new(cls) -> "Secrets":
        return cls(*(os.urandom(32).hex() for _ in cls._fields))

    def __repr__(self) -> str:
        """Without what is secret."""
        return "Secrets()"


def save(path: Path, place: Place, secrets: Secrets) -> None:
    """So that a driver that takes the job over goes on serving the page there. Raises OSError."""
    data = json.dumps({**place._asdict(), **secrets._asdict()}).encode()
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def load(path: Path) -> tuple[Place, Secrets]:
    """What save() has written. Raises OSError, ValueError."""
    found: Any = json.loads(path.read_bytes())
    try:
        place = Place(str(found["address"]), int(found["port"]), found["is_open"] is True)
        return place, Secrets(*(str(found[name]) for name in Secrets._fields))
    except (KeyError, TypeError) as error:
        raise ValueError(str(error)) from None


class Access:
    """Judges requests by their heads alone. `clock` is in seconds, and never goes back."""

    def __init__(
        self, job: str, place: Place, secrets: Secrets, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cookie_name = f"hvlaunch_{job}"
        self._is_open = place.is_open
        self._secure = b"" if place.is_open or is_loopback(place.address) else b"; Secure"
        address = f"[{place.address}]" if ":" in place.address else place.address
        self._names = _OWN_NAMES | {address.encode()}
        self._secrets = secrets
        self._clock = clock
        self._tokens: dict[str, float] = {}

    def new_token(self) -> str:
        """It lets one browser in."""
        token = os.urandom(16).hex()
        self._tokens[token] = self._clock() + _LIFE
        for old in list(self._tokens)[:-_MOST_TOKENS]:
            del self._tokens[old]
        return token

    def refusal(self, head: Head, *, is_public: bool) -> Answer | None:
        """Why this request is answered to nobody; None where it may be. What is public may be linked to from anywhere."""
        if not head.is_private and not self._is_open:
            return _refused(403, b"this page is served by https alone\n")
        host = head.fields.get(b"host", b"")
        if _name_of(host) not in self._names:  # another site's name that leads here: DNS rebinding
            return _refused(421, b"this is not the host that you have asked for\n")
        origin = head.fields.get(b"origin")
        if origin is not None and origin not in (b"http://" + host, b"https://" + host):
            return _refused(403, b"another site may not ask\n")
        if not is_public and head.fields.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
            return _refused(403, b"another site may not ask\n")
        return None

    def is_let_in(self, head: Head) -> bool:
        """Whether it shows the cookie and the key."""
        shown = [part.strip().partition(b"=") for part in head.fields.get(b"cookie", b"").split(b";")]
        cookies = [value for name, _, value in shown if name == self._cookie_name.encode()]
        has_cookie = any(hmac.compare_digest(value, self._secrets.cookie.encode()) for value in cookies)
        has_key = hmac.compare_digest(head.authorization, _BEARER + self._secrets.key.encode())
        return has_cookie and has_key

    @property
    def scrape_token(self) -> str:
        return self._secrets.scrape

    def scrape_refusal(self, head: Head) -> Answer | None:
        """Why these metrics are not for who asks; None where they are. Whatever name it has for this host is right."""
        if not head.is_private and not self._is_open:
            return _refused(403, b"this page is served by https alone\n")
        if not hmac.compare_digest(head.authorization, _BEARER + self._secrets.scrape.encode()):
            return _refused(401, b"hvlaunch metrics --scrape shows the token\n")
        return None

    def let_in(self, head: Head) -> Answer:
        """A browser shows its token: it gets the cookie and the key, if the token is one and was not used before."""
        shown = head.authorization.removeprefix(_BEARER)
        now = self._clock()
        known = next((one for one in self._tokens if hmac.compare_digest(one.encode(), shown)), None)
        until = 0.0 if known is None else self._tokens.pop(known)
        if until <= now:
            return _refused(401, b"this token is wrong, or was used before\n")
        cookie = b"Set-Cookie: %s=%s; HttpOnly; SameSite=Strict; Path=/%s\r\n" % (
            self._cookie_name.encode(),
            self._secrets.cookie.encode(),
            self._secure,
        )
        return Answer(200, json.dumps({"key": self._secrets.key}).encode(), cookie)


def _name_of(host: bytes) -> bytes:
    """Without the port: it may be another one here, by `ssh -L`."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() and (b":" not in name or name.startswith(b"[")) else host


def _refused(status: int, why: bytes) -> Answer:
    return Answer(status, why, to_stranger=True)
