"""Unfinished lines of workers that read the user's terminal: one that stands for a moment asks for an answer."""

from collections.abc import Iterable

from hvlaunch.console.lines import Key

__all__ = ["Prompts"]

_SETTLED = 0.15
"""Seconds after which nothing more of the line is expected."""


class Prompts:
    """`now` is in seconds, of any clock that never goes back."""

    def __init__(self) -> None:
        self._readers: frozenset[int] = frozenset()
        self._lines: dict[Key, bytes] = {}
        self._due: dict[Key, float] = {}

    def read_by(self, ranks: Iterable[int]) -> None:
        """These ranks read what the user types."""
        self._readers = frozenset(ranks)

    def __contains__(self, key: Key) -> bool:
        return key[0] in self._readers

    def feed(self, key: Key, unfinished: bytes, now: float) -> None:
        """The stream of a reader has this unfinished line now; none where it is empty."""
        self._lines.pop(key, None)
        self._due.pop(key, None)
        if unfinished:
            self._lines[key], self._due[key] = unfinished, now + _SETTLED

    @property
    def deadline(self) -> float | None:
        """When the next one is a prompt; in the past where it is one."""
        return min(self._due.values(), default=None)

    def current(self, now: float) -> tuple[Key, bytes] | None:
        """The prompt to show: that of the lowest rank."""
        return min(self._settled(now), default=None)

    def answered(self, now: float) -> list[Key]:
        """The user has typed a line: whose prompts are done."""
        keys = [key for key, _ in self._settled(now)]
        for key in keys:
            self.feed(key, b"", now)
        return keys

    def _settled(self, now: float) -> list[tuple[Key, bytes]]:
        return [(key, line) for key, line in self._lines.items() if self._due[key] <= now]
