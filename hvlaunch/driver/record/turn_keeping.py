"""When turns are put on record: before anything follows of them, and else together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvlaunch.driver.record.keeping import Keeping
from hvlaunch.driver.turn import Turn
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import HostReady

__all__ = ["TurnKeeping"]

_MOST_AT_ONCE = 256
_SECRETS = ("key", "session")


class TurnKeeping:
    """For the loop's thread alone. `begin` begins the record of a new job."""

    def __init__(
        self,
        keeping: Keeping,
        engine: Engine,
        begin: Callable[[], None],
    ) -> None:
        self._keeping = keeping
        self._engine = engine
        self._begin = begin
        self._waiting: list[Turn] = []

    @property
    def is_waiting(self) -> bool:
        """Whether there are turns that are not on record yet, of which nothing follows."""
        return bool(self._waiting)

    def keep(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Record turns with actions, and all that wait, and return those that are recorded now.

        Turns without actions may wait for others a moment, until a call with no turn.
        """
        self._waiting += turns
        if not self._waiting or (
            turns and len(self._waiting) < _MOST_AT_ONCE and not any(turn.actions for turn in turns)
        ):
            return ()
        recorded, self._waiting = self._waiting, []
        kept = [turn for turn in recorded if turn.is_decided]
        if kept:
            if not self._keeping.has_begun:
                self._begin()
            self._keeping.write(kept, _hellos(kept))
            self._keeping.fold(self._engine)
        return recorded


def _hellos(turns: Sequence[Turn]) -> dict[int, dict[str, Any]]:
    """What agents were greeted with, by their links."""
    greeted = [turn.arrival.source for turn in turns if isinstance(turn.arrival.event, HostReady)]
    return {source.number: _without_secrets(source.hello) for source in greeted if source is not None}


def _without_secrets(hello: Mapping[str, Any]) -> dict[str, Any]:
    """What may be known of it to whoever reads the journal."""
    rendezvous = hello["rendezvous"]
    return {
        **hello,
        **dict.fromkeys(_SECRETS),
        "rendezvous": None if rendezvous is None else {**rendezvous, "key": None},
    }
