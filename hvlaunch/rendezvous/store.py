"""The key-value store: scopes of keys, bytes for values, and callbacks for who waits for a key."""

from collections.abc import Callable
from dataclasses import dataclass

from hvlaunch.rendezvous.errors import StoreFull, ValueTooLarge

__all__ = ["Store", "StoreLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much a store may hold; all sizes in bytes."""

    value: int = 16 << 20
    """Of one value."""
    total: int = 512 << 20
    """Of all values, with the names of their scopes and keys."""
    keys: int = 100_000


class Store:
    """Values by scope and key. Not thread-safe: it belongs to one thread, the server's."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.keys = 0
        """How many keys are set."""
        self.size = 0
        """Bytes held, as `limits.total` counts them."""
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._waiters: dict[tuple[str, str], dict[object, Callable[[bytes], None]]] = {}

    @property
    def waiting(self) -> int:
        """How many waiters there are."""
        return sum(map(len, self._waiters.values()))

    def get(self, scope: str, key: str) -> bytes | None:
        """The value, or None where the key is not set."""
        return self._scopes.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Set the key, and call everyone who waits for it.

        Raises ValueTooLarge, or StoreFull; the store is then as it was.
        """
        if len(value) > self.limits.value:
            raise ValueTooLarge(
                f"{scope}/{key}: {len(value)} bytes, and a value may have {self.limits.value}"
            )
        old = self.get(scope, key)
        keys = self.keys + (old is None)
        size = self.size + _weight(scope, key, value) - _weight(scope, key, old)
        if keys > self.limits.keys:
            raise StoreFull(f"{scope}/{key}: there are {self.keys} keys already")
        if size > self.limits.total:
            raise StoreFull(
                f"{scope}/{key}: {len(value)} bytes more than the {self.limits.total} that all values may have"
            )
        self.keys, self.size = keys, size
        self._scopes.setdefault(scope, {})[key] = value
        for call in self._waiters.pop((scope, key), {}).values():
            call(value)

    def delete(self, scope: str, key: str) -> bool:
        """Forget the key; False where it was not set."""
        values = self._scopes.get(scope, {})
        old = values.pop(key, None)
        if old is None:
            return False
        if not values:
            del self._scopes[scope]
        self.keys -= 1
        self.size -= _weight(scope, key, old)
        return True

    def when_set(self, scope: str, key: str, call: Callable[[bytes], None]) -> Callable[[], None]:
        """Call `call(value)` once, inside the next put of the key.

        Returns a function that calls it off, at any time and any number of times.
        """
        place = scope, key
        waiter = object()
        self._waiters.setdefault(place, {})[waiter] = call

        def call_off() -> None:
            waiters = self._waiters.get(place, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._waiters.pop(place, None)

        return call_off


def _weight(scope: str, key: str, value: bytes | None) -> int:
    return 0 if value is None else len(scope) + len(key) + len(value)
