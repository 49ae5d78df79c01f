"""The key-value store: scopes of keys, bytes for values, a version for each change, and callbacks for who waits."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from hvlaunch.rendezvous.batch import Changes
from hvlaunch.rendezvous.client_errors import NotANumber, StoreFull, ValueTooLarge

__all__ = ["Changes", "Entry", "Store", "StoreLimits", "Waiters", "until_all_set", "until_changed"]

_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = 1 << 63


class StoreLimits(NamedTuple):
    """How much a store may hold; all sizes in bytes."""

    value: int = 16 << 20
    """Of one value."""
    total: int = 512 << 20
    """Of all values, with the names of their scopes and keys."""
    keys: int = 100_000
    deletions: int = 10_000
    """How many deletions are remembered for those who watch."""
    deleted_names: int = 4 << 20
    """Of the names that these deletions have."""
    waiting: int = 2_000_000
    """Watches, and keys that are waited for; not bytes."""


class Entry(NamedTuple):
    """A value, and the version of the change that set it."""

    value: bytes
    version: int


class _Scope:
    """The latest change of each key. Both dicts are in the order of the versions."""

    __slots__ = ("gone", "values")

    def __init__(self) -> None:
        self.values: dict[str, Entry] = {}
        self.gone: dict[str, int] = {}


class Store:
    """Values by scope and key. Not thread-safe: it belongs to one thread, the server's.

    Every change has a version of its own, greater than all before it; the first is greater than `version`.
    """

    def __init__(self, limits: StoreLimits | None = None, version: int = 0) -> None:
        self.limits = limits or StoreLimits()
        self.version = version
        """Of the latest change."""
        self.keys = 0
        """How many keys are set."""
        self.size = 0
        """Bytes held, as `limits.total` counts them."""
        self._scopes: dict[str, _Scope] = {}
        self._deletions: deque[tuple[str, str, int]] = deque()
        self._deleted_names = 0
        self.forgotten = version
        """The latest change that the remembered deletions may lack."""
        self.keep: Callable[[str, str, bytes | None, int, bool], None] | None = None
        """Called at each change with scope, key, value, version, and whether the value is only what was put behind the old."""
        self._until_set: Waiters[Callable[[bytes], None]] = Waiters()
        self._until_changed: Waiters[Callable[[], None]] = Waiters()
        self._subscribers: dict[str, dict[object, Callable[[str, bytes | None, int], None]]] = {}

    # Reading:

    def get(self, scope: str, key: str) -> bytes | None:
        """The value, or None where the key is not set."""
        place = self._scopes.get(scope)
        entry = None if place is None else place.values.get(key)
        return None if entry is None else entry.value

    def read(self, scope: str, key: str) -> Entry | None:
        """The value with its version, or None where the key is not set."""
        place = self._scopes.get(scope)
        return None if place is None else place.values.get(key)

    def keys_of(self, scope: str) -> list[str]:
        """The scope's keys, sorted."""
        place = self._scopes.get(scope)
        return [] if place is None else sorted(place.values)

    def count(self, scope: str) -> int:
        """How many keys the scope has."""
        place = self._scopes.get(scope)
        return 0 if place is None else len(place.values)

    def first_missing(self, scope: str, keys: Sequence[str], start: int = 0) -> int | None:
        """The index of the first key, from `start` on, that is not set; None where all are."""
        place = self._scopes.get(scope)
        values = {} if place is None else place.values
        return next((index for index in range(start, len(keys)) if keys[index] not in values), None)

    def scopes(self) -> list[str]:
        """The scopes that have keys."""
        return [name for name, place in self._scopes.items() if place.values]

    def changes(self, scope: str, key: str | None = None, *, since: int = 0) -> Changes | None:
        """What changed in the scope, or at its key, after version `since`; None where nothing did.

        0 is for who knows nothing yet, and hears of no deletion.
        """
        place = self._scopes.get(scope)
        known = 0 < since <= self.version and since >= self.forgotten
        if key is not None:
            return self._change(place, key, since if known else 0, asked=since)
        if not known:
            values = {} if place is None else {name: entry.value for name, entry in place.values.items()}
            return Changes(self.version, values, complete=True) if values or since else None
        if place is None:
            return None
        changed: dict[str, bytes | None] = {}
        for name, version in reversed(place.gone.items()):
            if version <= since:
                break
            changed[name] = None
        for name, entry in reversed(place.values.items()):
            if entry.version <= since:
                break
            changed[name] = entry.value
        return Changes(self.version, changed, complete=False) if changed else None

    def _change(self, place: _Scope | None, key: str, since: int, *, asked: int) -> Changes | None:
        entry = None if place is None else place.values.get(key)
        if entry is not None:
            news = entry.version > since
        elif since:
            news = place is not None and place.gone.get(key, 0) > since
        else:
            news = asked > 0  # a deletion that we have forgotten, if there was one
        value = None if entry is None else entry.value
        return Changes(self.version, {key: value}, complete=False) if news else None

    # Changing:

    def put(self, scope: str, key: str, value: bytes) -> int:
        """Set the key, and call everyone who waits for it; the version of the change.

        Raises ValueTooLarge, or StoreFull; the store is then as it was.
        """
        return self.put_many(scope, {key: value})

    def put_many(self, scope: str, values: Mapping[str, bytes]) -> int:
        """Set all keys, or, where that raises, none; then call those who wait. As put, of the last change."""
        return self._put(scope, values)

    def _put(self, scope: str, values: Mapping[str, bytes], piece: bytes | None = None) -> int:
        """`piece`: what is new in the one value."""
        if not values:
            return self.version
        self._make_room(scope, values)
        place = self._scopes.get(scope)
        if place is None:
            place = self._scopes[scope] = _Scope()
        for key, value in values.items():
            self.version += 1
            place.values.pop(key, None)  # so that it becomes the last
            place.values[key] = Entry(value, self.version)
            if place.gone:
                place.gone.pop(key, None)
            if self.keep is not None:
                self.keep(scope, key, value if piece is None else piece, self.version, piece is not None)
        first, version = self.version - len(values), self.version
        for number, (key, value) in enumerate(values.items(), 1):
            self._tell(scope, key, value, first + number)
        return version

    def add(self, scope: str, key: str, amount: int) -> int:
        """Add to the number that the value is in decimal digits; an absent one is 0.

        Raises NotANumber where it is none, or the sum has more than 64 bits; else as put.
        """
        entry = self.read(scope, key)
        old = b"0" if entry is None else entry.value
        if _NUMBER.fullmatch(old) is None:
            raise NotANumber(f"{scope}/{key}: the value is not a number")
        total = int(old) + amount
        if not -_INT64 <= total < _INT64:
            raise NotANumber(f"{scope}/{key}: the sum has more than 64 bits")
        self.put(scope, key, b"%d" % total)
        return total

    def append(self, scope: str, key: str, value: bytes) -> None:
        """Put the value behind what is there. Raises as put does."""
        old = self.get(scope, key) or b""
        if len(old) + len(value) > self.limits.value:
            raise self._too_large(scope, key, len(old) + len(value))
        self._put(scope, {key: old + value}, value)

    def compare_and_set(self, scope: str, key: str, value: bytes, version: int) -> int | None:
        """Set the key if `version` is the one it has now, 0 where it is not set; its new one, None if not set.

        Raises as put does.
        """
        entry = self.read(scope, key)
        if (0 if entry is None else entry.version) != version:
            return None
        return self.put(scope, key, value)

    def delete(self, scope: str, key: str) -> bool:
        """Forget the key; False where it was not set."""
        place = self._scopes.get(scope)
        if place is None or key not in place.values:
            return False
        version = self._remove(scope, place, key)
        self._forget_old_deletions()
        self._tell(scope, key, None, version)
        return True

    def delete_scope(self, scope: str) -> None:
        """Forget all keys of the scope."""
        place = self._scopes.get(scope)
        if place is None:
            return
        removed = [(key, self._remove(scope, place, key)) for key in list(place.values)]
        self._forget_old_deletions()
        for key, version in removed:
            self._tell(scope, key, None, version)

    def _make_room(self, scope: str, values: Mapping[str, bytes]) -> None:
        place = self._scopes.get(scope)
        old = {} if place is None else place.values
        keys, size = self.keys, self.size
        for key, value in values.items():
            if len(value) > self.limits.value:
                raise self._too_large(scope, key, len(value))
            entry = old.get(key)
            if entry is None:
                keys += 1
                size += len(scope) + len(key) + len(value)
            else:
                size += len(value) - len(entry.value)
        if keys > self.limits.keys:
            raise StoreFull(f"{_names(scope, values)}: the rendezvous is full: it has {self.keys} keys")
        if size > self.limits.total:
            raise StoreFull(
                f"{_names(scope, values)}: the rendezvous is full: it would have {size} bytes, and may have {self.limits.total}"
            )
        self.keys, self.size = keys, size

    def _too_large(self, scope: str, key: str, size: int) -> ValueTooLarge:
        return ValueTooLarge(f"{scope}/{key}: {size} bytes, but a value may have at most {self.limits.value}")

    def _remove(self, scope: str, place: _Scope, key: str) -> int:
        self.version += 1
        self._bury(scope, place, key, self.version)
        if self.keep is not None:
            self.keep(scope, key, None, self.version, False)
        return self.version

    def _bury(self, scope: str, place: _Scope, key: str, version: int) -> None:
        entry = place.values.pop(key, None)
        if entry is not None:
            self.keys -= 1
            self.size -= len(scope) + len(key) + len(entry.value)
        place.gone.pop(key, None)
        place.gone[key] = version
        self._deletions.append((scope, key, version))
        self._deleted_names += len(scope) + len(key)

    def _forget_old_deletions(self) -> None:
        limits = self.limits
        while len(self._deletions) > limits.deletions or self._deleted_names > limits.deleted_names:
            scope, key, version = self._deletions.popleft()
            self._deleted_names -= len(scope) + len(key)
            self.forgotten = version
            place = self._scopes.get(scope)
            if place is not None and place.gone.get(key) == version:
                del place.gone[key]
                if not place.gone and not place.values:
                    del self._scopes[scope]

    # As an earlier store was:

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """Scope, key and entry of all values, those of a scope in the order of their versions."""
        for scope, place in self._scopes.items():
            for key, entry in place.values.items():
                yield scope, key, entry

    def deletions(self) -> Iterator[tuple[str, str, int]]:
        """Scope, key and version of those that are remembered, in this order."""
        yield from self._deletions

    def news(self, scope: str, since: int) -> list[tuple[str, bytes | None, int]]:
        """Key, value and version of the latest changes in the scope after version `since`, in this order."""
        place = self._scopes.get(scope)
        if place is None:
            return []
        found: list[tuple[str, bytes | None, int]] = [(key, *entry) for key, entry in place.values.items()]
        found += [(key, None, version) for key, version in place.gone.items()]
        return sorted((each for each in found if each[2] > since), key=lambda each: each[2])

    def restore(self, scope: str, key: str, value: bytes | None, version: int) -> None:
        """The key had this value (None: it was deleted) since that version. Nobody is told; the latest come last."""
        self.version = max(self.version, version)
        place = self._scopes.get(scope)
        if place is None:
            place = self._scopes[scope] = _Scope()
        if value is None:
            self._bury(scope, place, key, version)
            return
        self._account(scope, key, place.values.pop(key, None), value)
        place.values[key] = Entry(value, version)
        place.gone.pop(key, None)

    def complete(self, scope: str, key: str, value: bytes) -> None:
        """The whole value of a key that is set."""
        place = self._scopes[scope]
        entry = place.values[key]
        self._account(scope, key, entry, value)
        place.values[key] = entry._replace(value=value)  # in its place: it is as new as it was

    def _account(self, scope: str, key: str, old: Entry | None, value: bytes) -> None:
        if old is None:
            self.keys += 1
            self.size += len(scope) + len(key)
        self.size += len(value) - (0 if old is None else len(old.value))

    def go_on_from(self, version: int, *, forgets: bool = False) -> None:
        """The next change is later than this version. `forgets`: changes up to here may be unknown here."""
        self.version = max(self.version, version)
        if forgets:
            self.forgotten = self.version
        self._forget_old_deletions()

    # Waiting:

    @property
    def waiting(self) -> int:
        """How many wait for a key to be set, or watch."""
        return self._until_set.count + self._until_changed.count

    def may_wait(self, keys: int) -> bool:
        """Whether one more may wait, for so many keys."""
        return self._until_set.weight + self._until_changed.weight + keys <= self.limits.waiting

    def when_set(
        self, scope: str, key: str, call: Callable[[bytes], None], keys: int = 1
    ) -> Callable[[], None]:
        """Call `call(value)` once, inside the next put of the key. `keys`: how many the caller waits for in all.

        Returns a function that calls it off, at any time and any number of times.
        """
        return self._until_set.add((scope, key), call, keys)

    def when_changed(self, scope: str, key: str | None, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call()` once, at the next change of the key, or of any key where it is None. Returns as when_set."""
        return self._until_changed.add((scope, key), call)

    def subscribe(self, scope: str, call: Callable[[str, bytes | None, int], None]) -> Callable[[], None]:
        """Call `call(key, value, version)` at each change of a key in the scope; None: deleted. Returns as when_set."""
        subscriber = object()
        self._subscribers.setdefault(scope, {})[subscriber] = call

        def call_off() -> None:
            subscribers = self._subscribers.get(scope, {})
            subscribers.pop(subscriber, None)
            if not subscribers:
                self._subscribers.pop(scope, None)

        return call_off

    def _tell(self, scope: str, key: str, value: bytes | None, version: int) -> None:
        if value is not None and self._until_set.count:
            for found in self._until_set.take((scope, key)):
                found(value)
        if self._until_changed.count:
            for changed in self._until_changed.take((scope, key)) + self._until_changed.take((scope, None)):
                changed()
        if scope in self._subscribers:
            for subscriber in list(self._subscribers[scope].values()):
                subscriber(key, value, version)


def _names(scope: str, keys: Iterable[str]) -> str:
    first, *others = keys
    return f"{scope}/{first}" + (f" and {len(others)} more" if others else "")


def until_all_set(
    store: Store, scope: str, keys: Sequence[str], missing: int, done: Callable[[], None]
) -> Callable[[], None]:
    """Call done() once, when all keys are set at one time; keys[missing] is not set now.

    It waits at one key at a time, so that a wait for many costs little more than for one. Returns a function
    that calls it off.
    """
    call_off = _nothing

    def wait_for(index: int) -> None:
        nonlocal call_off

        def found(_value: bytes) -> None:
            # Behind it first: what is before it was there, and is looked at again only when nothing is missing.
            following = store.first_missing(scope, keys, index + 1)
            if following is None:
                following = store.first_missing(scope, keys)
            if following is None:
                done()
            else:
                wait_for(following)

        call_off = store.when_set(scope, keys[index], found, len(keys))

    def end() -> None:
        call_off()

    wait_for(missing)
    return end


def until_changed(
    store: Store, scope: str, key: str | None, since: int, done: Callable[[Changes], None]
) -> Callable[[], None]:
    """Call done(changes) once, when the scope (or the key) has changes since that version. Returns as until_all_set."""
    call_off = _nothing

    def wait() -> None:
        nonlocal call_off
        call_off = store.when_changed(scope, key, look)

    def look() -> None:
        changes = store.changes(scope, key, since=since)
        if changes is None:  # who knows nothing yet does not hear of deletions
            wait()
        else:
            done(changes)

    def end() -> None:
        call_off()

    wait()
    return end


def _nothing() -> None:
    pass


CallT = TypeVar("CallT", bound=Callable[..., object])
Watched = tuple[str, str | None]


class Waiters(Generic[CallT]):
    """Callbacks by place: a scope and a key, or a scope and None."""

    def __init__(self) -> None:
        self.count = 0
        """How many there are."""
        self.weight = 0
        """What they weigh together."""
        self._calls: dict[Watched, dict[object, tuple[CallT, int]]] = {}

    def add(self, place: Watched, call: CallT, weight: int = 1) -> Callable[[], None]:
        """Keep `call` for the next take(place). `weight` says what it holds meanwhile.

        Returns a function that calls it off, at any time and any number of times.
        """
        waiter = object()
        self._calls.setdefault(place, {})[waiter] = call, weight
        self.count += 1
        self.weight += weight

        def call_off() -> None:
            calls = self._calls.get(place)
            if calls is not None and calls.pop(waiter, None) is not None:
                self.count -= 1
                self.weight -= weight
                if not calls:
                    del self._calls[place]

        return call_off

    def take(self, place: Watched) -> list[CallT]:
        """Those who wait at the place, in the order of their coming; they are forgotten here."""
        calls = self._calls.pop(place, None)
        if calls is None:
            return []
        self.count -= len(calls)
        self.weight -= sum(weight for _, weight in calls.values())
        return [call for call, _ in calls.values()]
