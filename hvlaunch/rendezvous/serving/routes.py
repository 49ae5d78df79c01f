"""The paths of the rendezvous: permissions, and the effects of requests.

`/<scope>/<key>` is a value (PUT, GET, DELETE); hvlaunch's own verbs live under `/-/`, so no scope is named "-".
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from hvlaunch.rendezvous.client_errors import StoreFull, ValueTooLarge
from hvlaunch.rendezvous.serving.horovod import HorovodScopes
from hvlaunch.rendezvous.serving.http import Answer, Head, Route
from hvlaunch.rendezvous.serving.store_record import Once
from hvlaunch.rendezvous.serving.traffic import Stats
from hvlaunch.rendezvous.serving.verbs import OWN, Verbs, not_allowed, refusal
from hvlaunch.rendezvous.store import Store

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["Routes", "health", "prometheus"]

_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")

_OK = Answer(200)
_BAD_PATH = Answer(400, b"the path is not /<scope>/<key>\n")
_ABSENT = Answer(404)
_READABLE = Answer(
    401,
    b"others can read this connection: use https\n",
    b"WWW-Authenticate: Bearer\r\n",
    to_unauthenticated=True,
)
_UNAUTHORIZED = Answer(401, b"unauthorized\n", b"WWW-Authenticate: Bearer\r\n", to_unauthenticated=True)


class Routes:
    """Called with a request's head: returns a refusal, or the route for its body.

    `token` opens everything on a private connection. `once` has answers to earlier requests. `about` has the answers to
    `/-/<name>` without keys. The scopes of `horovod` need neither a token nor a private connection.
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

    def __call__(self, head: Head) -> Answer | Route:
        path, _, query = head.target.partition(b"?")
        parts = _components(path)
        if not head.is_private and head.authorization:
            # Right or wrong, the token is no secret any more.
            return _READABLE
        # Before the path is judged: a client without the token learns nothing about paths.
        if not self._allowed(_bearer(head), parts, head):
            return _UNAUTHORIZED
        if parts is None:
            return _BAD_PATH
        if parts[0] == OWN:
            return self._verbs(head.method, parts[1:], query)
        # An unknown query may be meant for a verb: refused rather than ignored.
        if len(parts) != 2 or query:  # noqa: PLR2004 (scope and key)
            return _BAD_PATH
        return self._value(head.method, parts[0], parts[1])

    def _allowed(self, token: bytes | None, parts: list[str] | None, head: Head) -> bool:
        if token is not None:
            # In constant time: the duration must not reveal a part of the token.
            return compare_digest(token, self._token)
        # Another kind of credentials is wrong, and not the same as none.
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
        # Also for a missing key: a client may repeat its DELETE.
        return _OK


def _bearer(head: Head) -> bytes | None:
    """Return the token of the request, right or wrong."""
    scheme, _, given = head.authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else None


def _components(path: bytes) -> list[str] | None:
    """Return the decoded, non-empty components of a path; None if it is malformed."""
    if not path.startswith(b"/") or b"#" in path:
        return None
    try:
        # Split before decoding: an encoded slash belongs to a name.
        if b"%" not in path:
            parts = path[1:].decode().split("/")
        # unquote_to_bytes() leaves malformed escapes as they are, without an error.
        elif _BAD_PERCENT.search(path):
            return None
        else:
            parts = [unquote_to_bytes(part).decode() for part in path[1:].split(b"/")]
    except UnicodeDecodeError:
        return None
    return parts if all(parts) else None


_GAUGES = {
    "connections": "Open connections.",
    "keys": "Keys that are set.",
    "bytes": "Bytes held, names included.",
    "strangers": "Open connections that have not shown the token.",
    "waiting": "Long polls and watches not yet answered.",
}
_COUNTERS = {
    "dropped": "Connections ended because the client was too slow, idle, or took no answers.",
    "turned_away": "Connections ended because there were too many, of strangers above all.",
    "faults": "Exceptions that nobody caught; each is a defect of the server.",
}


def health(stats: Stats) -> Answer:
    """Return the server's health and numbers."""
    body = json.dumps({"status": "ok", **stats._asdict()}) + "\n"
    return Answer(200, body.encode(), b"Content-Type: application/json\r\n")


def prometheus(stats: Stats, answers: Mapping[int, int]) -> Answer:
    """Return the numbers for Prometheus, with answers by HTTP status. 501 without prometheus-client."""
    try:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 (100 ms, for few requests)
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 (as above)
        from prometheus_client.registry import Collector  # noqa: PLC0415 (as above)
    except ImportError:
        return Answer(501, b"the server has no prometheus-client; pip install prometheus-client\n")

    class Numbers(Collector):
        def collect(self) -> "Iterator[Metric]":
            return _families(stats, answers)

    # A registry of its own: the global one has the process' own metrics.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers())
    content_type = f"Content-Type: {CONTENT_TYPE_LATEST}\r\n".encode("ascii")
    return Answer(200, generate_latest(registry), content_type)


def _families(stats: Stats, answers: Mapping[int, int]) -> "Iterator[Metric]":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 (as above)

    values = {**stats._asdict(), "bytes": stats.size}
    requests = CounterMetricFamily(_name("requests"), "Answers by HTTP status.", labels=["status"])
    for status, count in sorted(answers.items()):
        requests.add_metric([str(status)], count)
    yield requests
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(_name(name), text, value=values[name])
    for name, text in _GAUGES.items():
        yield GaugeMetricFamily(_name(name), text, value=values[name])


def _name(name: str) -> str:
    return f"hvlaunch_rendezvous_{name}"
