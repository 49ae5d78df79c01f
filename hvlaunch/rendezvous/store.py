"""The key-value store: values by scope and key, a version for each change, and callbacks for waiting clients; the scopes of Horovod's workers, open without a token."""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous import NotANumber, StoreFull, ValueTooLarge
from hvlaunch.rendezvous.messages import Changes

__all__ = [
    "Changes",
    "Entry",
    "HorovodScopes",
    "Store",
    "StoreLimits",
    "Waiters",
    "until_all_set",
    "until_changed",
]


_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
_INT64 = 1 << 63


class StoreLimits(NamedTuple):
    """Limits of a store; sizes in bytes."""

    value: int = 16 << 20
    """Of a single value."""
    total: int = 512 << 20
    """Of the whole content, with the names of scopes and keys."""
    keys: int = 100_000
    deletions: int = 10_000
    """Deletions remembered for watches."""
    deleted_names: int = 4 << 20
    """Of the names of remembered deletions."""
    waiting: int = 2_000_000
    """Watches, plus keys awaited; a count."""


class Entry(NamedTuple):
    """A value and the version of its change."""

    value: bytes
    version: int


class _Scope:
    """The latest change of each key. Both dicts are in the order of versions."""

    __slots__ = ("gone", "values")

    def __init__(self) -> None:
        self.values: dict[str, Entry] = {}
        self.gone: dict[str, int] = {}


class Store:
    """Values by scope and key. Not thread-safe: a store belongs to the server's thread.

    Each change has a version, greater than all before; the first is greater than `version`.
    """

    def __init__(self, limits: StoreLimits | None = None, version: int = 0) -> None:
        self.limits = limits or StoreLimits()
        self.version = version
        """The latest change."""
        self.keys = 0
        """The number of keys."""
        self.size = 0
        """Bytes held, as `limits.total` counts them."""
        self._scopes: dict[str, _Scope] = {}
        self._deletions: deque[tuple[str, str, int]] = deque()
        self._deleted_names = 0
        self.forgotten = version
        """Deletions up to this version may be forgotten."""
        self.keep: Callable[[str, str, bytes | None, int, bool], None] | None = None
        """Called at each change with scope, key, value, version, and True if the value is only the appended part."""
        self._until_set: Waiters[Callable[[bytes], None]] = Waiters()
        self._until_changed: Waiters[Callable[[], None]] = Waiters()
        self._subscribers: dict[str, dict[object, Callable[[str, bytes | None, int], None]]] = {}

    # Reading:

    def get(self, scope: str, key: str) -> bytes | None:
        """Return the value; None if the key is not set."""
        place = self._scopes.get(scope)
        entry = None if place is None else place.values.get(key)
        return None if entry is None else entry.value

    def read(self, scope: str, key: str) -> Entry | None:
        """Return the value with its version; None if the key is not set."""
        place = self._scopes.get(scope)
        return None if place is None else place.values.get(key)

    def keys_of(self, scope: str) -> list[str]:
        """Return the scope's keys, sorted."""
        place = self._scopes.get(scope)
        return [] if place is None else sorted(place.values)

    def count(self, scope: str) -> int:
        """Return the number of keys in the scope."""
        place = self._scopes.get(scope)
        return 0 if place is None else len(place.values)

    def first_missing(self, scope: str, keys: Sequence[str], start: int = 0) -> int | None:
        """Return the index of the first missing key from `start` on; None if every key is set."""
        place = self._scopes.get(scope)
        values = {} if place is None else place.values
        return next((index for index in range(start, len(keys)) if keys[index] not in values), None)

    def scopes(self) -> list[str]:
        """Return the scopes with keys."""
        return [name for name, place in self._scopes.items() if place.values]

    def changes(self, scope: str, key: str | None = None, *, since: int = 0) -> Changes | None:
        """Return the changes of the scope, or of its key, after version `since`; None without a change.

        A client without knowledge passes 0, and gets no deletions.
        """
        place = self._scopes.get(scope)
        is_remembered = 0 < since <= self.version and since >= self.forgotten
        if key is not None:
            return self._change(place, key, since if is_remembered else 0, requested=since)
        if not is_remembered:
            values = {} if place is None else {name: entry.value for name, entry in place.values.items()}
            return Changes(self.version, values, complete=True) if values or since else None
        if place is None:
            return None
        changed: dict[str, bytes | None] = {}
        # The newest changes are last: reading from the end costs as much as there are changes.
        for name, version in reversed(place.gone.items()):
            if version <= since:
                break
            changed[name] = None
        for name, entry in reversed(place.values.items()):
            if entry.version <= since:
                break
            changed[name] = entry.value
        return Changes(self.version, changed, complete=False) if changed else None

    def _change(self, place: _Scope | None, key: str, since: int, *, requested: int) -> Changes | None:
        entry = None if place is None else place.values.get(key)
        if entry is not None:
            news = entry.version > since
        elif since:
            news = place is not None and place.gone.get(key, 0) > since
        else:
            # The client may lack a deletion that the store has forgotten.
            news = requested > 0
        value = None if entry is None else entry.value
        return Changes(self.version, {key: value}, complete=False) if news else None

    # Changing:

    def put(self, scope: str, key: str, value: bytes) -> int:
        """Set the key, call its waiters, and return the version of the change.

        Raises ValueTooLarge, or StoreFull; the store is unchanged then.
        """
        return self.put_many(scope, {key: value})

    def put_many(self, scope: str, values: Mapping[str, bytes]) -> int:
        """Set several keys, or none if this raises, and return the version of the last change. See put()."""
        return self._put(scope, values)

    def _put(self, scope: str, values: Mapping[str, bytes], piece: bytes | None = None) -> int:
        """Set the values; `piece` is the appended part of a single value."""
        if not values:
            return self.version
        # All checks come before the first change: a refused put changes nothing.
        self._make_room(scope, values)
        place = self._scopes.get(scope)
        if place is None:
            place = self._scopes[scope] = _Scope()
        for key, value in values.items():
            self.version += 1
            # A dict keeps a replaced key at its old place, and changes() relies on the order of
            # versions.
            place.values.pop(key, None)
            place.values[key] = Entry(value, self.version)
            if place.gone:
                place.gone.pop(key, None)
            # The record gets each change before any waiting client hears of it.
            if self.keep is not None:
                self.keep(scope, key, value if piece is None else piece, self.version, piece is not None)
        # Callbacks come last: a waiter may read or change the store.
        first, version = self.version - len(values), self.version
        for number, (key, value) in enumerate(values.items(), 1):
            self._notify(scope, key, value, first + number)
        return version

    def add(self, scope: str, key: str, amount: int) -> int:
        """Add to a number in decimal digits (0 if missing) and return the sum.

        Raises NotANumber if the value is not a number, or the sum exceeds 64 bits; else like put().
        """
        entry = self.read(scope, key)
        old = b"0" if entry is None else entry.value
        # int() alone would also take spaces, underscores and thousands of digits.
        if _NUMBER.fullmatch(old) is None:
            raise NotANumber(f"{scope}/{key}: the value is not a number")
        total = int(old) + amount
        if not -_INT64 <= total < _INT64:
            raise NotANumber(f"{scope}/{key}: the sum has more than 64 bits")
        self.put(scope, key, b"%d" % total)
        return total

    def append(self, scope: str, key: str, value: bytes) -> None:
        """Append to the value. Raises like put()."""
        old = self.get(scope, key) or b""
        # Checked before the two are joined: a refused request costs no copy.
        if len(old) + len(value) > self.limits.value:
            raise self._too_large(scope, key, len(old) + len(value))
        # The file gets the appended part alone: whole values would make many small appends costly.
        self._put(scope, {key: old + value}, value)

    def compare_and_set(self, scope: str, key: str, value: bytes, version: int) -> int | None:
        """Set the key if it still has this version (0: not set). Return its new version; None if it has another.

        Raises like put().
        """
        entry = self.read(scope, key)
        if (0 if entry is None else entry.version) != version:
            return None
        return self.put(scope, key, value)

    def delete(self, scope: str, key: str) -> bool:
        """Delete the key; False if it was not set."""
        place = self._scopes.get(scope)
        if place is None or key not in place.values:
            return False
        version = self._remove(scope, place, key)
        self._forget_old_deletions()
        self._notify(scope, key, None, version)
        return True

    def delete_scope(self, scope: str) -> None:
        """Delete the scope's keys."""
        place = self._scopes.get(scope)
        if place is None:
            return
        # A copy of the keys: _remove() changes the dict.
        removed = [(key, self._remove(scope, place, key)) for key in list(place.values)]
        self._forget_old_deletions()
        # Callbacks come last, as in _put(): they may read or change the store.
        for key, version in removed:
            self._notify(scope, key, None, version)

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
        # After all checks: a refused batch changes nothing.
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
        # Removed first, so that the key moves to the end: changes() relies on the order of versions.
        place.gone.pop(key, None)
        place.gone[key] = version
        self._deletions.append((scope, key, version))
        self._deleted_names += len(scope) + len(key)

    def _forget_old_deletions(self) -> None:
        limits = self.limits
        while len(self._deletions) > limits.deletions or self._deleted_names > limits.deleted_names:
            scope, key, version = self._deletions.popleft()
            # Names count too: a client could set and delete ever new long keys.
            self._deleted_names -= len(scope) + len(key)
            self.forgotten = version
            place = self._scopes.get(scope)
            # The key may have been set again meanwhile, or deleted again.
            if place is not None and place.gone.get(key) == version:
                del place.gone[key]
                # Otherwise each scope that was ever used would stay in memory.
                if not place.gone and not place.values:
                    del self._scopes[scope]

    # Restoring an earlier store:

    def entries(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield scope, key and entry of each value, in the order of versions within a scope."""
        for scope, place in self._scopes.items():
            for key, entry in place.values.items():
                yield scope, key, entry

    def deletions(self) -> Iterator[tuple[str, str, int]]:
        """Yield scope, key and version of remembered deletions, the oldest first."""
        yield from self._deletions

    def news(self, scope: str, since: int) -> list[tuple[str, bytes | None, int]]:
        """Return key, value and version of the latest changes in the scope after version `since`, in order."""
        place = self._scopes.get(scope)
        if place is None:
            return []
        changes: list[tuple[str, bytes | None, int]] = [(key, *entry) for key, entry in place.values.items()]
        changes += [(key, None, version) for key, version in place.gone.items()]
        return sorted((change for change in changes if change[2] > since), key=lambda change: change[2])

    def restore(self, scope: str, key: str, value: bytes | None, version: int) -> None:
        """Take over a value (None: a deletion) with its version, in the order of versions. No callback is called."""
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
        """Set the whole value of a key restored by parts."""
        place = self._scopes[scope]
        entry = place.values[key]
        self._account(scope, key, entry, value)
        # The key stays at its old place: its version is the same.
        place.values[key] = entry._replace(value=value)

    def _account(self, scope: str, key: str, old: Entry | None, value: bytes) -> None:
        if old is None:
            self.keys += 1
            self.size += len(scope) + len(key)
        self.size += len(value) - (0 if old is None else len(old.value))

    def go_on_from(self, version: int, *, forgets: bool = False) -> None:
        """Let the next change have a later version. With `forgets`, earlier changes count as unknown."""
        self.version = max(self.version, version)
        if forgets:
            self.forgotten = self.version
        self._forget_old_deletions()

    # Waiting:

    @property
    def waiting(self) -> int:
        """The number of waits and watches."""
        return self._until_set.count + self._until_changed.count

    def may_wait(self, keys: int) -> bool:
        """True if another client may wait for so many keys."""
        return self._until_set.weight + self._until_changed.weight + keys <= self.limits.waiting

    def when_set(
        self, scope: str, key: str, call: Callable[[bytes], None], keys: int = 1
    ) -> Callable[[], None]:
        """Call `call(value)` once, inside the next put of the key. `keys` is the number of keys of the whole wait.

        Returns a function to cancel it, at any time and any number of times.
        """
        return self._until_set.add((scope, key), call, keys)

    def when_changed(self, scope: str, key: str | None, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call()` once, at the next change of the key, or of any key if it is None. Returns like when_set()."""
        return self._until_changed.add((scope, key), call)

    def subscribe(self, scope: str, call: Callable[[str, bytes | None, int], None]) -> Callable[[], None]:
        """Call `call(key, value, version)` at each change in the scope; the value of a deletion is None. Returns like when_set()."""
        subscriber = object()
        self._subscribers.setdefault(scope, {})[subscriber] = call

        def call_off() -> None:
            subscribers = self._subscribers.get(scope, {})
            subscribers.pop(subscriber, None)
            if not subscribers:
                self._subscribers.pop(scope, None)

        return call_off

    def _notify(self, scope: str, key: str, value: bytes | None, version: int) -> None:
        if value is not None and self._until_set.count:
            for set_call in self._until_set.take((scope, key)):
                set_call(value)
        if self._until_changed.count:
            for changed in self._until_changed.take((scope, key)) + self._until_changed.take((scope, None)):
                changed()
        if scope in self._subscribers:
            # A copy: a subscriber may cancel itself, or another, during its call.
            for subscriber in list(self._subscribers[scope].values()):
                subscriber(key, value, version)


def _names(scope: str, keys: Iterable[str]) -> str:
    first, *others = keys
    return f"{scope}/{first}" + (f" and {len(others)} more" if others else "")


def until_all_set(
    store: Store, scope: str, keys: Sequence[str], missing: int, done: Callable[[], None]
) -> Callable[[], None]:
    """Call done() once, when all keys are set at the same time; keys[missing] is not set now.

    The wait is at a single key at a time, and costs little more for many keys. Returns a function to cancel it.
    """
    call_off = _nothing

    def wait_for(index: int) -> None:
        nonlocal call_off

        def check_next(_value: bytes) -> None:
            # Later keys first: earlier ones were set, and are checked again only when no other is missing.
            following = store.first_missing(scope, keys, index + 1)
            if following is None:
                following = store.first_missing(scope, keys)
            if following is None:
                done()
            else:
                wait_for(following)

        call_off = store.when_set(scope, keys[index], check_next, len(keys))

    def end() -> None:
        call_off()

    wait_for(missing)
    return end


def until_changed(
    store: Store, scope: str, key: str | None, since: int, done: Callable[[Changes], None]
) -> Callable[[], None]:
    """Call done(changes) once, when the scope (or the key) has changes since this version. Returns like until_all_set()."""
    call_off = _nothing

    def wait() -> None:
        nonlocal call_off
        call_off = store.when_changed(scope, key, look)

    def look() -> None:
        changes = store.changes(scope, key, since=since)
        # Only a deletion, which a client without knowledge need not hear of.
        if changes is None:
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
        """The number of callbacks."""
        self.weight = 0
        """The sum of their weights."""
        self._calls: dict[Watched, dict[object, tuple[CallT, int]]] = {}

    def add(self, place: Watched, call: CallT, weight: int = 1) -> Callable[[], None]:
        """Keep `call` for the next take(place). `weight` counts its cost meanwhile.

        Returns a function to cancel it, at any time and any number of times.
        """
        # A key of its own: the same callback may wait more than once.
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
        """Remove and return the callbacks of the place, in the order of add()."""
        calls = self._calls.pop(place, None)
        if calls is None:
            return []
        self.count -= len(calls)
        self.weight -= sum(weight for _, weight in calls.values())
        return [call for call, _ in calls.values()]


_VARIANT = "_process_set_hash_"
_NOTIFICATIONS = "worker_addresses"
"""Horovod's elastic driver would notify the workers of other hosts there; they register before training."""


class HorovodScopes:
    """`global`, `local_<host>`, `cross_<local_rank>` with their sizes, and the scopes of process sets beside each.

    Open only to clients at `addresses`, which may also write to `worker_addresses`. As in Horovod's own server, a DELETE
    of a rank means this rank has finished; the scope is cleared after its last rank.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._addresses: frozenset[str] = frozenset()
        self._finished: dict[str, set[str]] = {}
        self.round: int | None = None
        """The round of the open scopes."""

    def open(self, sizes: Mapping[str, int], addresses: Iterable[str], number: int) -> None:
        """Open these scopes to these addresses, and close all others, for the round of this number."""
        self.round = number
        self._sizes = dict(sizes)
        self._addresses = frozenset(addresses)
        self._finished.clear()

    def describe(self) -> bytes:
        """Return the state for restore()."""
        return json.dumps([self._sizes, sorted(self._addresses), self.round]).encode("ascii")

    def restore(self, described: bytes) -> None:
        """Open the scopes of an earlier server. The ranks already finished are unknown; the next open() counts anew."""
        self.open(*json.loads(described))

    def __contains__(self, scope: str) -> bool:
        return scope in self._sizes or scope.partition(_VARIANT)[0] in self._sizes

    def opens(self, method: str, scope: str, peer: str) -> bool:
        """True if a client at this address may use the scope so without a token."""
        # By address alone: Horovod's workers have no token.
        return peer in self._addresses and (scope in self or (method, scope) == ("PUT", _NOTIFICATIONS))

    def delete(self, store: Store, scope: str, key: str) -> None:
        """Delete the key; a rank's counts as finished."""
        if not key.isdecimal():
            store.delete(scope, key)
        elif scope in self._sizes:
            finished = self._finished.setdefault(scope, set())
            # A rank counts once, even if its DELETE is repeated.
            finished.add(key)
            if len(finished) >= self._sizes[scope]:
                del self._finished[scope]
                store.delete_scope(scope)
        else:
            # The size of a process set is unknown. All of its ranks have set their addresses before the first deletes its own.
            store.delete(scope, key)
            if not any(other.isdecimal() for other in store.keys_of(scope)):
                store.delete_scope(scope)

    def clear(self, store: Store) -> None:
        """Delete the keys of all open scopes."""
        for scope in store.scopes():
            if scope in self or scope == _NOTIFICATIONS:
                store.delete_scope(scope)
