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
from hvlaunch.rendezvous.serving.verbs import OWN, Verbs, not_allowed, refusal
from hvlaunch.rendezvous.store import Store

__all__ = ["Routes"]

_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_OK = Answer(200)
_BAD_PATH = Answer(400, b"the path is not /<scope>/<key>\n")
_ABSENT = Answer(404)
_UNAUTHORIZED = Answer(401, b"unauthorized\n", b"WWW-Authenticate: Bearer\r\n")


class Routes:
    """Called with a request's head: gives the refusal, or what to do with its body.

    token opens everything; probe_token only `/-/nonce`, which tells `nonce`. `about` gives the answers to
    other `/-/<name>`s that are not about keys. `horovod` are the scopes that need no token.
    """

    def __init__(
        self,
        store: Store,
        *,
        token: str,
        probe_token: str,
        nonce: str,
        horovod: HorovodScopes | None = None,
        about: Mapping[str, Callable[[], Answer]] | None = None,
    ) -> None:
        if not token or not probe_token:
            raise ValueError("a token must not be empty: it would let everyone in")
        self._horovod = horovod or HorovodScopes()
        self._store = store
        self._token = token.encode("ascii")
        self._probe_token = probe_token.encode("ascii")
        answer = Answer(200, nonce.encode("ascii"))
        self._verbs = Verbs(store, {"nonce": lambda: answer, **(about or {})})

    def __call__(self, head: Head) -> Answer | Route:
        path, _, query = head.target.partition(b"?")
        parts = _components(path)
        if not self._allowed(parts, head):
            return _UNAUTHORIZED
        if parts is None:
            return _BAD_PATH
        if parts[0] == OWN:
            return self._verbs(head.method, parts[1:], query)
        if len(parts) != 2 or query:  # noqa: PLR2004 (scope and key)
            return _BAD_PATH
        return self._value(head.method, parts[0], parts[1])

    def _allowed(self, parts: list[str] | None, head: Head) -> bool:
        scheme, _, given = head.authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            given = given.strip()
            is_token = compare_digest(given, self._token)
            is_probe_token = compare_digest(given, self._probe_token)
            return is_token or (is_probe_token and parts == [OWN, "nonce"])
        return not head.authorization and parts is not None and self._horovod.opens(parts[0], head.peer)

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
