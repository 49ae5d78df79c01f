"""Which states of progress bars are kept in an output store: one a second, or they would push all else out of it."""

from collections.abc import Callable

from hvlaunch.console.lines import Key
from hvlaunch.console.recent import Origin

__all__ = ["BarStates"]

_PAUSE = 1.0
"""Seconds between two states of a bar that are kept."""

State = tuple[bytes, Origin | None]


class BarStates:
    """Holds back the newest states of each stream's bar until the last one that was kept is old enough, or other output comes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[Key, State] = {}
        self._next: dict[Key, float] = {}
        """When another state may be kept."""
        self._begun: set[Key] = set()
        """Those whose last state that is kept may go on."""

    def add(self, key: Key, data: bytes, origin: Origin | None) -> list[State]:
        """What is to be kept now, of what came before and of this; due() or release() give the rest later."""
        before = self._held.pop(key, None)
        if b"\n" in data or not (data.startswith(b"\r") or data.endswith(b"\r")):
            return self._kept(key, [(data, origin)] if before is None else [before, (data, origin)])
        if before is not None:
            data = _newest(before[0] + data, is_begun=key in self._begun)
        now = self._clock()
        if now < self._next.get(key, 0.0):
            self._held[key] = data, origin
            return []
        self._next[key] = now + _PAUSE
        return self._kept(key, [(data, origin)])

    def release(self, key: Key) -> State | None:
        """What was held back of this stream, which has ended."""
        self._begun.discard(key)
        return self._held.pop(key, None)

    def due(self) -> list[tuple[Key, State]]:
        """What has been held back for long enough."""
        if not self._held:
            return []
        now = self._clock()
        keys = [key for key in self._held if now >= self._next[key]]
        self._next.update(dict.fromkeys(keys, now + _PAUSE))
        return [(key, state) for key in keys for state in self._kept(key, [self._held.pop(key)])]

    @property
    def deadline(self) -> float | None:
        """When something will be due."""
        return min((self._next[key] for key in self._held), default=None)

    def _kept(self, key: Key, states: list[State]) -> list[State]:
        (self._begun.discard if states[-1][0].endswith((b"\r", b"\n")) else self._begun.add)(key)
        return states


def _newest(states: bytes, *, is_begun: bool) -> bytes:
    r"""Without the states that others take the place of: the last whole one stays, and what was begun since.

    Chunks may end anywhere in a state: where one `is_begun` in what is kept already, its end stays, too.
    """
    first, last = states.find(b"\r"), states.rfind(b"\r")
    begin = max(first, states.rfind(b"\r", 0, last))
    return (states[:first] if is_begun else b"") + states[begin:]
