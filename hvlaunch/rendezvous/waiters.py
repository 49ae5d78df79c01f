"""Callbacks of who waits for a change, by place."""

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Waiters"]

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
