"""The places of the rendezvous: who may ask for what, and what is done then.

`/<scope>/<key>` is a value (PUT, GET, DELETE); hvlaunch's own verbs live under `/-/`, so no scope is named "-".
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from hmac import compare_digest
from urllib.parse import unquote_to_bytes

from hvlaunch.rendezvous.client_errors import StoreFull, ValueTooLarge
from hvlaunch.rendezvous.serving.horovod import HorovodScopes
from hvlaunch.rendezvous.serving.http import Answer, Head, Route
from hvlaunch.rendezvous.serving.once import Once
from hvlaunch.rendezvous.serving.verbs import OWN, Verbs, not_allowed, refusal
from hvlaunch.rendezvous.store import Store

__all__ = ["Routes"]

_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_OK = Answer(200)
_BAD_PATH = Answer(400, b"the path is not /<scope>/<key>\n")
_ABSENT = Answer(404)
_READABLE = Answer(
    401, b"others can read this connection: use https\n", b"WWW-Authenticate: Bearer\r\n", to_stranger=True
)
_UNAUTHORIZED = Answer(401, b"unauthorized\n", b"WWW-Authenticate: Bearer\r\n", to_stranger=True)


class Routes:
    """Called with a request's head: gives the refusal, or what to do with its body.

    token opens everything, where nobody else can read or change what is said. `once` has what was done already. `about` gives the answers to
    `/-/<name>`s that are not about keys. `horovod` are the scopes that need no token, nor that nobody else can.
    """

    def __init__(
        self,
        store: Store,
        *,
        token: str,
        once: Once | None = None,
        horovod: HorovodScopes | None = None,
        about: Mapping[str, Callable[[], Answer]] | None = None,
    ) -> None:
        if not token:
            raise ValueError("a token must not be empty: it would let everyone in")
        self._horovod = horovod or HorovodScopes()
        self._store = store
        self._token = token.encode("ascii")
        self._verbs = Verbs(store, once or Once(), about or {})

    def __call__(self, head: Head, *, is_private: bool = True) -> Answer | Route:
        path, _, query = head.target.partition(b"?")
        parts = _components(path)
        if not is_private and head.authorization:
            return _READABLE  # whether or not the token is right: it is no secret any more
        if not self._allowed(_bearer(head), parts, head):
            return _UNAUTHORIZED
        if parts is None:
            return _BAD_PATH
        if parts[0] == OWN:
            return self._verbs(head.method, parts[1:], query)
        if len(parts) != 2 or query:  # noqa: PLR2004 (scope and key)
            return _BAD_PATH
        return self._value(head.method, parts[0], parts[1])

    def _allowed(self, token: bytes | None, parts: list[str] | None, head: Head) -> bool:
        if token is not None:
            return compare_digest(token, self._token)
        if head.authorization or parts is None:
            return False
        return self._horovod.opens(head.method, parts[0], head.peer)

    def _value(self, method: str, scope: str, key: str) -> Answer | Route:
        if method == "GET":
            return partial(self._get, scope, key)
        if method == "PUT":
            return partial(self._put, scope, key)
        if method == "DELETE":
            return partial(self._delete, scope, key)
        return not_allowed("GET, PUT, DELETE")

    def _get(self, scope: str, key: str, _body: bytes) -> Answer:
        value = self._store.get(scope, key)
        return _ABSENT if value is None else Answer(200, value)

    def _put(self, scope: str, key: str, body: bytes) -> Answer:
        try:
            self._store.put(scope, key, body)
        except (ValueTooLarge, StoreFull) as error:
            return refusal(error)
        return _OK

    def _delete(self, scope: str, key: str, _body: bytes) -> Answer:
        if scope in self._horovod:
            self._horovod.delete(self._store, scope, key)
        else:
            self._store.delete(scope, key)
        return _OK  # also where it was not set, so that a DELETE can be repeated


def _bearer(head: Head) -> bytes | None:
    """The token that the request shows, be it right or wrong."""
    scheme, _, given = head.authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else None


def _components(path: bytes) -> list[str] | None:
    """The decoded components, none of them empty; None where the path is no such thing."""
    if not path.startswith(b"/") or b"#" in path:
        return None
    try:
        if b"%" not in path:
            parts = path[1:].decode().split("/")
        elif _BAD_PERCENT.search(path):
            return None
        else:
            parts = [unquote_to_bytes(part).decode() for part in path[1:].split(b"/")]
    except UnicodeDecodeError:
        return None
    return parts if all(parts) else None
