"""Groups: the reported state of the workers is that of their newest round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.lifecycle import AT_WORK
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Groups"]


class Groups(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._newest = do.GroupState("", None)

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        states = [action for action in actions if isinstance(action, do.GroupState)]
        assert len(states) <= 1, f"{states} at once"
        for state in states:
            assert state != self._newest, f"{state} is no change"
            self._newest = state

    def after(self) -> None:
        if self.world.engine.phase not in AT_WORK:
            return
        current = self.ledger.current
        if current is None:
            names = {"INIT"}
        elif not self.ledger.workers:
            names = {"STOPPED"}
        else:
            # A round that breaks when none of its workers is left to be told breaks without a word.
            is_alive = any(self.ledger.living())
            names = {"HEALTHY"} if is_alive and not current.is_broken else {"UNHEALTHY", "UNKNOWN"}
            names |= set() if is_alive else {"HEALTHY"}
        number = None if current is None else current.number
        assert self._newest.state in names, f"the workers are said to be {self._newest}, not {names}"
        assert self._newest.round == number, f"the newest round is {number}, and {self._newest} is said"
