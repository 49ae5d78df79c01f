"""The journal of a simulated driver: what outlives it, to the byte."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import decode
from hvlaunch.engine.entries import Turn, begin_entry, turn_entry
from hvlaunch.job import JobSpec

__all__ = ["Journal", "Origin", "Record"]


class Origin(NamedTuple):
    """The frame that an event came with: the agent's host and number, and the frame's own."""

    host: str
    agent: int
    number: int


class Record(NamedTuple):
    turn: Turn
    origin: Origin | None


class Journal:
    """Entries as lines. They are made when somebody reads them, since few do."""

    def __init__(self, spec: JobSpec) -> None:
        self._bytes = json.dumps(begin_entry("0", "j0b", spec, 4711)).encode() + b"\n"
        self._new: list[tuple[float, on.Event, Sequence[do.Action], Origin | None]] = []

    def write(self, at: float, event: on.Event, actions: Sequence[do.Action], origin: Origin | None) -> None:
        self._new.append((at, event, list(actions), origin))

    def fold(self, lull: on.Lull) -> None:
        """The newest turn was idle: with those before it that were, it comes to this."""
        at, _, _, origin = self._new.pop()
        if self._new and isinstance(self._new[-1][1], on.Lull):
            before = self._new.pop()[3]
            origin = max(filter(None, (before, origin)), default=None)
        self._new.append((at, lull, [], origin))

    def tear(self, share: float) -> None:
        """The newest record is written as far as this share of its bytes."""
        newest = self._line(self._new.pop())
        self._flush()
        self._bytes += newest[: int(share * len(newest))]

    def entries(self) -> list[dict[str, Any]]:
        """What a successor finds; it takes away the record that was half written."""
        self._flush()
        self._bytes = self._bytes[: self._bytes.rfind(b"\n") + 1]
        return [json.loads(line) for line in self._bytes.splitlines()]

    @staticmethod
    def records(entries: Sequence[dict[str, Any]]) -> Iterator[Record]:
        """The turns in them."""
        for entry in entries[1:]:
            origin = entry["origin"]
            yield Record(decode(Turn, entry["turn"]), None if origin is None else Origin(*origin))

    def _flush(self) -> None:
        self._bytes += b"".join(map(self._line, self._new))
        self._new.clear()

    @staticmethod
    def _line(new: tuple[float, on.Event, Sequence[do.Action], Origin | None]) -> bytes:
        at, event, actions, origin = new
        return json.dumps({"turn": turn_entry(event, actions, at), "origin": origin}).encode() + b"\n"
