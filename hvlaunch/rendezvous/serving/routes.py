"""The paths of the rendezvous: permissions, and the effects of requests.

`/<scope>/<key>` is a value (PUT, GET, DELETE). hvlaunch's own verbs, `/-/<verb>/<scope>/<key>`, live under `/-/`, so no
scope is named "-"; docs/interfaces/rendezvous-http.md has their table. A request with an `id` may be repeated: the server executes it once.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous import NotANumber, StoreFull, ValueTooLarge, messages
from hvlaunch.rendezvous.messages import Changes
from hvlaunch.rendezvous.serving.http import Answer, CallOff, Give, Head, Later, Route
from hvlaunch.rendezvous.serving.store_record import Once
from hvlaunch.rendezvous.serving.traffic import Stats
from hvlaunch.rendezvous.store import HorovodScopes, Store, until_all_set, until_changed

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["MAX_WAIT", "OWN", "Routes", "Verbs", "health", "prometheus"]

MAX_WAIT = 60.0
"""The longest wait of a request, in seconds; a longer wait is shortened."""

OWN = "-"
"""The first component of the verbs' paths, and therefore no scope's name."""

_MAX_KEYS_BODY = 1 << 20  # bytes of a list of keys, held during a wait
_MAX_BATCH = 64 << 20  # bytes of values in an answer

_OPTIONS = {
    b"wait": re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?"),
    b"since": re.compile(rb"[0-9]{1,18}"),
    b"version": re.compile(rb"[0-9]{1,18}"),
    b"id": re.compile(rb"[0-9A-Za-z_-]{1,64}"),
}
_AMOUNT = re.compile(rb"[+-]?[0-9]{1,19}")

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
_BAD_VERB_PATH = Answer(400, b"the path is not one of this verb\n")
_BAD_QUERY = Answer(400, b"the query is not understood\n")
_BAD_AMOUNT = Answer(400, b"the amount is no decimal number\n")
_BAD_HEAD = Answer(400, b"the first line is no list of keys with their sizes\n")
_LONG_LIST = Answer(413, b"the list of keys is too long\n")
_LONG_ANSWER = Answer(413, b"the values are too much for one answer\n")
_MANY_WAIT = Answer(507, b"too many wait already\n")

Options = Mapping[bytes, bytes]
Act = Callable[[str, str, Options, bytes], "Answer | Later"]
"""Called with scope and key ("" for a verb without), the options and the body."""


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
        return _not_allowed("GET, PUT, DELETE")

    def _get(self, scope: str, key: str, _body: bytes) -> Answer:
        value = self._store.get(scope, key)
        return _ABSENT if value is None else Answer(200, value)

    def _put(self, scope: str, key: str, body: bytes) -> Answer:
        try:
            self._store.put(scope, key, body)
        except (ValueTooLarge, StoreFull) as error:
            return _refusal(error)
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


# The verbs


class _Verb(NamedTuple):
    method: str
    names: tuple[int, ...]
    """Allowed numbers of names in the path: 1 is a scope, 2 a scope and a key."""
    options: tuple[bytes, ...]
    act: Act


class Verbs:
    """The verbs of a store; `about` has the answers to verbs without keys."""

    def __init__(self, store: Store, once: Once, about: Mapping[str, Callable[[], Answer]]) -> None:
        self._store = store
        self._once = once
        self._verbs = {
            "get": _Verb("GET", (2,), (b"wait",), self._get),
            "read": _Verb("GET", (2,), (), self._read),
            "keys": _Verb("GET", (1,), (), self._keys),
            "count": _Verb("GET", (1,), (), self._count),
            "watch": _Verb("GET", (1, 2), (b"since", b"wait"), self._watch),
            "check": _Verb("POST", (1,), (b"wait",), self._check),
            "get-many": _Verb("POST", (1,), (), self._get_many),
            "put-many": _Verb("POST", (1,), (), self._put_many),
            "add": _Verb("POST", (2,), (b"id",), self._add),
            "append": _Verb("POST", (2,), (b"id",), self._append),
            "compare": _Verb("POST", (2,), (b"version", b"id"), self._compare),
            "delete": _Verb("POST", (2,), (b"id",), self._delete),
            "scope": _Verb("DELETE", (1,), (), self._delete_scope),
        }
        for name, describe in about.items():
            self._verbs[name] = _Verb("GET", (0,), (), partial(_describe, describe))

    def __call__(self, method: str, names: list[str], query: bytes) -> Answer | Route:
        """Return a refusal, or the route for the body. `names` are the path's components behind `/-/`."""
        verb = self._verbs.get(names[0]) if names else None
        if verb is None:
            return _ABSENT
        if method != verb.method:
            return _not_allowed(verb.method)
        names = names[1:]
        # "-" is no scope: a verb's path must not reach another verb.
        if len(names) not in verb.names or names[:1] == [OWN]:
            return _BAD_VERB_PATH if verb.names[0] else _ABSENT
        options = _read_options(query, verb.options)
        if options is None:
            return _BAD_QUERY
        scope, key = (*names, "", "")[:2]
        return partial(_guarded, verb.act, scope, key, options)

    # A single key:

    def _get(self, scope: str, key: str, options: Options, _body: bytes) -> Answer | Later:
        value = self._store.get(scope, key)
        if value is not None:
            return Answer(200, value)

        def begin(give: Give) -> CallOff:
            return self._store.when_set(scope, key, lambda value: give(Answer(200, value)))

        return self._later(begin, options, _ABSENT)

    def _later(
        self,
        begin: Callable[[Give], CallOff],
        options: Options,
        late: Answer,
        keys: int = 1,
    ) -> Answer | Later:
        # A proxy or firewall would cut a longer silence.
        seconds = min(float(options.get(b"wait", b"0")), MAX_WAIT)
        if seconds <= 0:
            return late
        return Later(begin, seconds, late) if self._store.may_wait(keys) else _MANY_WAIT

    def _read(self, scope: str, key: str, _options: Options, _body: bytes) -> Answer:
        return self._versioned(scope, key, 200, 404)

    def _versioned(self, scope: str, key: str, present: int, absent: int) -> Answer:
        entry = self._store.read(scope, key)
        if entry is None:
            return Answer(absent, b"", _etag(0))
        return Answer(present, entry.value, _etag(entry.version))

    def _compare(self, scope: str, key: str, options: Options, body: bytes) -> Answer:
        if b"version" not in options:
            return _BAD_QUERY

        def compare() -> Answer:
            version = self._store.compare_and_set(scope, key, body, int(options[b"version"]))
            return (
                self._versioned(scope, key, 412, 412) if version is None else Answer(200, b"", _etag(version))
            )

        # A repeated request gets the answer of its first copy, and not a failed comparison.
        return self._once(options.get(b"id"), compare, Answer)

    def _add(self, scope: str, key: str, options: Options, body: bytes) -> Answer:
        if _AMOUNT.fullmatch(body) is None:
            return _BAD_AMOUNT
        return self._once(
            options.get(b"id"), lambda: Answer(200, b"%d" % self._store.add(scope, key, int(body))), Answer
        )

    def _append(self, scope: str, key: str, options: Options, body: bytes) -> Answer:
        def append() -> Answer:
            self._store.append(scope, key, body)
            return _OK

        return self._once(options.get(b"id"), append, Answer)

    def _delete(self, scope: str, key: str, options: Options, _body: bytes) -> Answer:
        return self._once(
            options.get(b"id"), lambda: _OK if self._store.delete(scope, key) else _ABSENT, Answer
        )

    # Several keys:

    def _keys(self, scope: str, _key: str, _options: Options, _body: bytes) -> Answer:
        return Answer(200, messages.pack(self._store.keys_of(scope)))

    def _count(self, scope: str, _key: str, _options: Options, _body: bytes) -> Answer:
        return Answer(200, b"%d" % self._store.count(scope))

    def _get_many(self, scope: str, _key: str, _options: Options, body: bytes) -> Answer:
        # Checked before the parse: a list of a MiB expands to many objects.
        if len(body) > _MAX_KEYS_BODY:
            return _LONG_LIST
        # One moment: no other request runs between two keys.
        values = [self._store.get(scope, key) for key in messages.read_keys(body)]
        return _batch(messages.sizes(values), values)

    def _put_many(self, scope: str, _key: str, _options: Options, body: bytes) -> Answer:
        if len(body) > _MAX_KEYS_BODY and body.find(b"\n", 0, _MAX_KEYS_BODY) < 0:
            return _LONG_LIST
        head, data = messages.split(body)
        try:
            keys = [key for key, _ in head]
            sizes = [size for _, size in head]
        except (TypeError, ValueError):
            return _BAD_HEAD
        messages.check_keys(keys)
        values = [value for value in messages.unpack(sizes, data) if value is not None]
        # A missing size means None to unpack(), and nothing to a put.
        if len(values) < len(keys):
            return _BAD_HEAD
        self._store.put_many(scope, dict(zip(keys, values, strict=True)))
        return _OK

    def _delete_scope(self, scope: str, _key: str, _options: Options, _body: bytes) -> Answer:
        self._store.delete_scope(scope)
        return _OK

    def _check(self, scope: str, _key: str, options: Options, body: bytes) -> Answer | Later:
        if len(body) > _MAX_KEYS_BODY:
            return _LONG_LIST
        keys = messages.read_keys(body)
        missing = self._store.first_missing(scope, keys)
        if missing is None:
            return _OK

        def begin(give: Give) -> CallOff:
            return until_all_set(self._store, scope, keys, missing, lambda: give(_OK))

        return self._later(begin, options, _ABSENT, len(keys))

    def _watch(self, scope: str, key: str, options: Options, _body: bytes) -> Answer | Later:
        since = int(options.get(b"since", b"0"))
        changes = self._store.changes(scope, key or None, since=since)
        if changes is not None:
            return _changes(changes)

        def begin(give: Give) -> CallOff:
            return until_changed(
                self._store, scope, key or None, since, lambda changes: give(_changes(changes))
            )

        return self._later(begin, options, Answer(404, b"", _etag(self._store.version)))


def _not_allowed(methods: str) -> Answer:
    """Refuse a method other than these."""
    return Answer(405, b"method not allowed\n", b"Allow: " + methods.encode("ascii") + b"\r\n")


def _refusal(error: ValueTooLarge | StoreFull | NotANumber) -> Answer:
    """Return the refusal for an impossible change of the store."""
    status = 413 if isinstance(error, ValueTooLarge) else 507 if isinstance(error, StoreFull) else 409
    return Answer(status, f"{error.cause}\n".encode())


def _guarded(act: Act, scope: str, key: str, options: Options, body: bytes) -> Answer | Later:
    try:
        return act(scope, key, options, body)
    except (ValueTooLarge, StoreFull, NotANumber) as error:
        return _refusal(error)
    except messages.MalformedBatch as error:
        return Answer(400, f"{error}\n".encode())


def _describe(
    describe: Callable[[], Answer], _scope: str, _key: str, _options: Options, _body: bytes
) -> Answer:
    return describe()


def _read_options(query: bytes, allowed: tuple[bytes, ...]) -> Options | None:
    """Return the options; None if any is unknown, malformed or repeated."""
    options: dict[bytes, bytes] = {}
    for option in query.split(b"&") if query else ():
        name, _, value = option.partition(b"=")
        if name not in allowed or name in options or _OPTIONS[name].fullmatch(value) is None:
            return None
        options[name] = value
    return options


def _etag(version: int) -> bytes:
    return b'ETag: "%d"\r\n' % version


def _changes(changes: Changes) -> Answer:
    values = list(changes.values.values())
    keys = list(zip(changes.values, messages.sizes(values), strict=True))
    return _batch({"version": changes.version, "complete": changes.complete, "keys": keys}, values)


def _batch(head: object, values: list[bytes | None]) -> Answer:
    # A single answer must not hold half of the server's memory.
    if sum(len(value) for value in values if value is not None) > _MAX_BATCH:
        return _LONG_ANSWER
    return Answer(200, messages.pack(head, values))


# The server's numbers

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
