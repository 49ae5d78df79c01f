"""Seniority: survivors keep their order, rank 0 is the oldest of them, and new hosts come as they are listed."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

__all__ = ["Seniority"]


class Seniority(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            if isinstance(action, tell.RoundStarting):
                self._check_newcomers(action.hosts)
        formed = next((action for action in actions if isinstance(action, tell.RoundFormed)), None)
        places = sorted(
            (action for action in actions if isinstance(action, do.Assign)),
            key=lambda action: action.launch.place.rank,
        )
        if formed is not None and all(
            self.ledger.workers[place.launch.seat].last_round < 0 for place in places
        ):
            self._check_newcomers(formed.hosts)
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

    def _check_newcomers(self, hosts: Sequence[str]) -> None:
        """Check that the hosts of the last round come first, in its order, and the others in the order of the list."""
        last = () if self.ledger.current is None else self.ledger.current.hosts
        listing = self.ledger.listing
        stayed = sorted((name for name in hosts if name in last), key=last.index)
        new = sorted((name for name in hosts if name not in last and name in listing), key=listing.index)
        assert list(hosts) == [*stayed, *new], f"the hosts are {hosts}, after {last}, and listed as {listing}"
