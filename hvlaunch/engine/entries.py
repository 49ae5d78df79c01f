"""A job's journal: what its engine was begun with, then each event with what the engine made of it. Pure.

An entry is data for JSON. Nothing else has to be kept: an engine that is fed the same is in the same state, in
another process too. Random words are none of an engine's business, so none are here, and no key of the job is.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from hvlaunch.engine.actions import Action
from hvlaunch.engine.codec import BadData, decode, encode
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import Event
from hvlaunch.job import JobSpec

__all__ = ["FORMAT", "Begin", "Diverged", "Entry", "Turn", "begin_entry", "begin_of", "replay", "turn_entry"]

FORMAT = 1
"""Of the entries; another one is not read."""

Entry = Mapping[str, Any]


class Begin(NamedTuple):
    """What the engine was begun with, and whose journal this is."""

    format: int
    version: str
    """Of hvlaunch: another one's engine may decide otherwise."""
    job_id: str
    spec: JobSpec
    rendezvous_port: int
    cwd: str = ""
    """Where the driver itself was."""


class Turn(NamedTuple):
    """One event at a time (seconds of the driver's clock), and what the engine wanted done."""

    at: float
    event: Event
    actions: tuple[Action, ...]


class Diverged(Exception):
    """An engine wants something else done than the journal has. `number` counts turns from 0."""

    def __init__(self, number: int, turn: Turn, actions: Sequence[Action]) -> None:
        pairs = zip_longest(turn.actions, actions)
        before, now = next(pair for pair in pairs if not _are_equal(*pair))
        super().__init__(
            f"turn {number}, at {turn.at:.3f}, {turn.event}: the journal has {before}, and now it is {now}"
        )
        self.number = number
        self.turn = turn
        self.actions = tuple(actions)


def begin_entry(version: str, job_id: str, spec: JobSpec, rendezvous_port: int, cwd: str = "") -> Entry:
    """The first entry. Raises BadData."""
    found: Entry = encode(Begin, Begin(FORMAT, version, job_id, spec, rendezvous_port, cwd))
    return found


def turn_entry(event: Event, actions: Sequence[Action], now: float) -> Entry:
    """A further one. Raises BadData."""
    found: Entry = encode(Turn, Turn(now, event, tuple(actions)))
    return found


def replay(entries: Iterable[Entry]) -> Engine:
    """The engine as it is after all of these: it is fed each event again, and must want the same done.

    Raises Diverged where it does not, BadData where the entries are none.
    """
    rest = iter(entries)
    begin = begin_of(next(rest, None))
    engine = Engine(begin.spec, begin.rendezvous_port)
    for number, entry in enumerate(rest):
        turn: Turn = decode(Turn, entry)
        actions = engine.handle_or_end(turn.event, turn.at)
        if not all(_are_equal(*pair) for pair in zip_longest(turn.actions, actions)):
            raise Diverged(number, turn, actions)
    return engine


def begin_of(entry: Entry | None) -> Begin:
    """What begin_entry() was given. Raises BadData."""
    if entry is None:
        raise BadData("a journal without entries")
    if entry.get("format") != FORMAT:
        raise BadData(f"format {entry.get('format')!r} of a journal; {FORMAT} is known")
    begin: Begin = decode(Begin, entry)
    return begin


def _are_equal(one: Action | None, other: Action | None) -> bool:
    """As data: named tuples themselves do not mind of which class they are."""
    return bool(encode(Action | None, one) == encode(Action | None, other))
