"""The entries of a job's journal: the engine's beginning, then each event with the resulting actions. Pure.

An entry is data for JSON. Nothing else needs to be kept: an engine that gets the same events is in the same state, in
another process too. The entries contain neither random words nor keys of the job, which the engine never sees.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from hvlaunch.engine.actions import Action
from hvlaunch.engine.codec import Entry, begin_of, decode, encode
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import Event

__all__ = [
    "DecidedTurn",
    "Diverged",
    "replay",
    "turn_entry",
]


class DecidedTurn(NamedTuple):
    """One event, its time (seconds of the driver's clock), and the engine's actions."""

    at: float
    event: Event
    actions: tuple[Action, ...]


class Diverged(Exception):
    """The engine's actions differ from the journal's. `number` counts turns from 0."""

    def __init__(self, number: int, turn: DecidedTurn, actions: Sequence[Action]) -> None:
        pairs = zip_longest(turn.actions, actions)
        before, now = next(pair for pair in pairs if not _are_equal(*pair))
        super().__init__(
            f"turn {number}, at {turn.at:.3f}, {turn.event}: the journal has {before}, and now it is {now}"
        )
        self.number = number
        self.turn = turn
        self.actions = tuple(actions)


def turn_entry(event: Event, actions: Sequence[Action], now: float) -> Entry:
    """Make a further entry. Raises BadData."""
    entry: Entry = encode(DecidedTurn, DecidedTurn(now, event, tuple(actions)))
    return entry


def replay(entries: Iterable[Entry]) -> Engine:
    """Return the engine after these entries: it gets each event again, and must return the same actions.

    Raises Diverged if it does not, and BadData if an entry is malformed.
    """
    remaining = iter(entries)
    begin = begin_of(next(remaining, None))
    engine = Engine(begin.spec, begin.rendezvous_port)
    # Times come from the journal: the engine has no clock.
    for number, entry in enumerate(remaining):
        turn: DecidedTurn = decode(DecidedTurn, entry)
        actions = engine.handle_or_end(turn.event, turn.at)
        if not all(_are_equal(*pair) for pair in zip_longest(turn.actions, actions)):
            raise Diverged(number, turn, actions)
    return engine


def _are_equal(first: Action | None, second: Action | None) -> bool:
    """Compare actions as data: named tuples of different classes may be equal."""
    return bool(encode(Action | None, first) == encode(Action | None, second))
