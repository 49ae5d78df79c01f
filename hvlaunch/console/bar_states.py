"""Which states of progress bars are kept in an output store: one a second, or they would push all else out of it."""

from collections.abc import Callable

from hvlaunch.console.lines import Key
from hvlaunch.console.recent import Origin

__all__ = ["BarStates"]

_PAUSE = 1.0
"""Seconds between two states of a bar that are kept."""

State = tuple[bytes, Origin | None]


class BarStates:
    """Holds back the newest state of each stream's bar until the last one that was kept is old enough, or other output comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[Key, State] = {}
        self._next: dict[Key, float] = {}
        """When another state may be kept."""

    def holds(self, key: Key, data: bytes, origin: Origin | None) -> bool:
        """Whether this is not to be kept now; due() or release() give it later, unless a newer state takes its place."""
        if b"\n" in data or not (data.startswith(b"\r") or data.endswith(b"\r")):
            return False
        now = self._clock()
        if now >= self._next.get(key, 0.0):
            self._held.pop(key, None)
            self._next[key] = now + _PAUSE
            return False
        self._held[key] = data, origin
        return True

    def release(self, key: Key) -> State | None:
        """What was held back of this stream, which now comes before anything else of it."""
        return self._held.pop(key, None)

    def due(self) -> list[tuple[Key, State]]:
        """What has been held back for long enough."""
        if not self._held:
            return []
        now = self._clock()
        keys = [key for key in self._held if now >= self._next[key]]
        self._next.update(dict.fromkeys(keys, now + _PAUSE))
        return [(key, self._held.pop(key)) for key in keys]

    @property
    def deadline(self) -> float | None:
        """When something will be due."""
        return min((self._next[key] for key in self._held), default=None)
