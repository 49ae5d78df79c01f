"""Seniority: survivors keep their order, and rank 0 is the oldest of them."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from tests.simulation.laws.law import Law

__all__ = ["Seniority"]


class Seniority(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        places = sorted(
            (action for action in actions if isinstance(action, do.Assign)),
            key=lambda action: action.launch.place.rank,
        )
        last = self.ledger.current
        if not places or last is None:
            return
        members = [self.ledger.workers[action.launch.seat] for action in places]
        before = [worker.rank for worker in members if worker.last_round == last.number]
        assert before == sorted(before), f"survivors change their order: {before}"
        if any(worker.last_round >= 0 for worker in members):
            assert members[0].last_round >= 0, "rank 0 is no survivor"
        if before and members[0].last_round == last.number:
            assert members[0].rank == before[0], "rank 0 is not the oldest"
