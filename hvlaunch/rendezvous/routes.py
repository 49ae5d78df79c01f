"""The places of the rendezvous: who may ask for what, and what is done then.

`/<scope>/<key>` is a value (PUT, GET, DELETE); hvlaunch's own verbs live under `/-/`, so no scope is named "-".
"""

import re
from collections.abc import Callable
from functools import partial
from hmac import compare_digest
from urllib.parse import unquote_to_bytes

from hvlaunch.rendezvous.errors import StoreFull, ValueTooLarge
from hvlaunch.rendezvous.http import Answer, Head, Later, Route
from hvlaunch.rendezvous.store import Store

__all__ = ["MAX_WAIT", "Routes"]

MAX_WAIT = 60.0
"""The longest wait of one request, in seconds; a longer one is shortened to it."""

_OWN = "-"
_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_SECONDS = re.compile(rb"wait=([0-9]{1,9}(?:\.[0-9]{1,9})?)")

_OK = Answer(200)
_BAD_PATH = Answer(400, b"the path is not /<scope>/<key>\n")
_BAD_QUERY = Answer(400, b"the query is not understood\n")
_ABSENT = Answer(404)
_UNAUTHORIZED = Answer(401, b"unauthorized\n", b"WWW-Authenticate: Bearer\r\n")


class Routes:
    """Called with a request's head: gives the refusal, or what to do with its body.

    token opens everything; probe_token only `/-/nonce`, which tells `nonce`.
    """

    def __init__(self, store: Store, *, token: str, probe_token: str, nonce: str) -> None:
        if not token or not probe_token:
            raise ValueError("an empty token would let everyone in")
        self._store = store
        self._token = token.encode("ascii")
        self._probe_token = probe_token.encode("ascii")
        self._nonce = Answer(200, nonce.encode("ascii"))
        self._verbs: dict[str, Callable[[list[str], bytes], Answer | Route]] = {
            "get": self._get_or_wait,
            "nonce": self._tell_nonce,
        }

    def __call__(self, head: Head) -> Answer | Route:
        path, _, query = head.target.partition(b"?")
        parts = _components(path)
        if not self._allowed(parts, head.authorization):
            return _UNAUTHORIZED
        if parts is None:
            return _BAD_PATH
        if parts[0] == _OWN:
            verb = self._verbs.get(parts[1]) if len(parts) > 1 else None
            if verb is None:
                return _ABSENT
            return verb(parts[2:], query) if head.method == "GET" else _not_allowed("GET")
        if len(parts) != 2 or query:  # noqa: PLR2004 (scope and key)
            return _BAD_PATH
        return self._value(head.method, parts[0], parts[1])

    def _allowed(self, parts: list[str] | None, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        given = given.strip()
        is_token = compare_digest(given, self._token)
        is_probe_token = compare_digest(given, self._probe_token)
        return is_token or (is_probe_token and parts == [_OWN, "nonce"])

    def _value(self, method: str, scope: str, key: str) -> Answer | Route:
        if method == "GET":
            return partial(self._get, scope, key)
        if method == "PUT":
            return partial(self._put, scope, key)
        if method == "DELETE":
            return partial(self._delete, scope, key)
        return _not_allowed("GET, PUT, DELETE")

    def _get(self, scope: str, key: str, _body: bytes) -> Answer:
        value = self._store.get(scope, key)
        return _ABSENT if value is None else Answer(200, value)

    def _put(self, scope: str, key: str, body: bytes) -> Answer:
        try:
            self._store.put(scope, key, body)
        except ValueTooLarge as error:
            return Answer(413, f"{error.cause}\n".encode())
        except StoreFull as error:
            return Answer(507, f"{error.cause}\n".encode())
        return _OK

    def _delete(self, scope: str, key: str, _body: bytes) -> Answer:
        self._store.delete(scope, key)
        return _OK  # also where it was not set, so that a DELETE can be repeated

    def _tell_nonce(self, parts: list[str], query: bytes) -> Answer | Route:
        if parts or query:
            return _ABSENT if parts else _BAD_QUERY
        return lambda _body: self._nonce

    def _get_or_wait(self, parts: list[str], query: bytes) -> Answer | Route:
        if len(parts) != 2 or parts[0] == _OWN:  # noqa: PLR2004 (scope and key)
            return _BAD_PATH
        wait = _SECONDS.fullmatch(query or b"wait=0")
        if wait is None:
            return _BAD_QUERY
        scope, key = parts
        return partial(self._wait, scope, key, min(float(wait[1]), MAX_WAIT))

    def _wait(self, scope: str, key: str, seconds: float, body: bytes) -> Answer | Later:
        answer = self._get(scope, key, body)
        if answer is not _ABSENT or seconds <= 0:
            return answer

        def begin(give: Callable[[Answer], None]) -> Callable[[], None]:
            return self._store.when_set(scope, key, lambda value: give(Answer(200, value)))

        return Later(begin, seconds, _ABSENT)


def _components(path: bytes) -> list[str] | None:
    """The decoded components, none of them empty; None where the path is no such thing."""
    if not path.startswith(b"/") or b"#" in path or _BAD_PERCENT.search(path):
        return None
    try:
        parts = [unquote_to_bytes(part).decode() for part in path[1:].split(b"/")]
    except UnicodeDecodeError:
        return None
    return parts if all(parts) else None


def _not_allowed(methods: str) -> Answer:
    return Answer(405, b"method not allowed\n", b"Allow: " + methods.encode("ascii") + b"\r\n")
