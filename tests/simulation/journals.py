"""The journal of a simulated driver, which survives it to the byte."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import DecidedTurn, begin_entry, decode, turn_entry
from hvlaunch.job import JobSpec

__all__ = ["Journal", "Origin", "Record"]


class Origin(NamedTuple):
    """Source of an event: host and number of the agent, and number of its frame."""

    host: str
    agent: int
    number: int


class Record(NamedTuple):
    turn: DecidedTurn
    origin: Origin | None


class Journal:
    """Entries as lines, made on reading, which is rare."""

    def __init__(self, spec: JobSpec) -> None:
        self._bytes = json.dumps(begin_entry("0", "j0b", spec, 4711)).encode() + b"\n"
        self._new: list[tuple[float, on.Event, Sequence[do.Action], Origin | None]] = []

    def write(self, at: float, event: on.Event, actions: Sequence[do.Action], origin: Origin | None) -> None:
        self._new.append((at, event, list(actions), origin))

    def fold(self, lull: on.Lull) -> None:
        """Replace the newest turn, and idle ones before it, by one summary."""
        at, _, _, origin = self._new.pop()
        if self._new and isinstance(self._new[-1][1], on.Lull):
            before = self._new.pop()[3]
            origin = max(filter(None, (before, origin)), default=None)
        self._new.append((at, lull, [], origin))

    def tear(self, share: float) -> None:
        """Write this share of the newest record's bytes."""
        newest = self._line(self._new.pop())
        self._flush()
        self._bytes += newest[: int(share * len(newest))]

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries for a successor, without a half-written record."""
        self._flush()
        self._bytes = self._bytes[: self._bytes.rfind(b"\n") + 1]
        return [json.loads(line) for line in self._bytes.splitlines()]

    @staticmethod
    def records(entries: Sequence[dict[str, Any]]) -> Iterator[Record]:
        """Return the turns in the entries."""
        for entry in entries[1:]:
            origin = entry["origin"]
            yield Record(decode(DecidedTurn, entry["turn"]), None if origin is None else Origin(*origin))

    def _flush(self) -> None:
        self._bytes += b"".join(map(self._line, self._new))
        self._new.clear()

    @staticmethod
    def _line(new: tuple[float, on.Event, Sequence[do.Action], Origin | None]) -> bytes:
        at, event, actions, origin = new
        return json.dumps({"turn": turn_entry(event, actions, at), "origin": origin}).encode() + b"\n"
