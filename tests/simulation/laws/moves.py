"""Moves: nothing changes before the substitutes wait, no commit is lost, and each move comes to an end."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import Phase
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Moves"]

_SOON = 1.0
_LONGEST = 90.0
"""Seconds for which the workers of a host may take to leave, of which most are those of drains, grace and probes."""


class Moves(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._host: str | None = None
        self._is_leaving = False
        self._due = math.inf
        self._leaving = 0
        """Number of workers that leave the host."""
        self._lost_since: float | None = None
        self._has_followed = False
        """True if a round has begun since the host's workers were told to leave."""
        self._gone_since: float | None = None
        self._retired: set[str] = set()
        """Hosts that were moved, or whose workers leave."""
        self._needed_since: float | None = None

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        if isinstance(event, on.MoveWanted):
            has_answer = any(isinstance(action, tell.MoveBeginning | tell.HostStays) for action in actions)
            assert has_answer, f"a request to move {event.host} has no answer"
        given_up = {action.host for action in actions if isinstance(action, do.Abandon)}
        for action in actions:
            match action:
                case tell.MoveBeginning(host):
                    assert self._host is None, f"{host} is moved, and {self._host} too"
                    self._host, self._due = host, self.ledger.now + self.world.options.elastic_timeout + 1.0
                case tell.HostMoving(host, _):
                    self._check_substitutes(host)
                    self._is_leaving, self._has_followed = True, False
                    self._retired.add(host)
                    drain = self.world.options.drain_timeout
                    self._due = self.ledger.now + drain + self.world.spec.lease + _LONGEST
                case tell.HostMoved(host, _, _):
                    assert self._is_leaving and host == self._host, f"{host} has moved, and nobody began it"
                    left = [worker for worker in self.ledger.workers.values() if worker.host == host]
                    assert not left or host in given_up, f"{host} has moved, and {left[0]} is there"
                    self._end()
                case tell.HostStays(host, _, was_moving) if was_moving:
                    assert host == self._host, f"the move of {host} is given up, and nobody began it"
                    self._end()
                case do.Change(_, why.WorkersToLeave((host,))) if host == self._host and not self._is_leaving:
                    assert not self.ledger.host(host).is_usable(self.ledger.now), (
                        f"{host} is left before its substitutes wait"
                    )
                case tell.HostExcluded(host, _, why.WorkersMoved()):
                    usable = [other for other in self.ledger.usable() if not other.is_suspected]
                    slots = sum(other.slots for other in usable if other.name not in given_up)
                    assert slots < self.world.options.min_np, f"{host} is used again, and nobody needs it"
                case tell.RoundFormed(number, _, _, cause) if self._is_leaving:
                    self._has_followed = True
                    if isinstance(cause, why.WorkersToLeave):
                        self._check_commits(number, actions)

    def _end(self) -> None:
        self._host, self._is_leaving, self._due, self._gone_since = None, False, math.inf, None

    def _check_substitutes(self, host: str) -> None:
        """Check that as many workers wait on other hosts as are to leave, and enough for a round."""
        leaving = sum(worker.host == host and worker.round is not None for worker in self.ledger.living())
        waiting = self._count_substitutes(host)
        assert waiting >= leaving, f"{leaving} workers of {host} leave, and {waiting} wait for them"
        self._leaving = leaving

    def _count_substitutes(self, host: str) -> int:
        """Return the number of waiting workers that were not in the newest round."""
        ledger = self.ledger
        usable = {other.name: other.slots for other in ledger.usable() if other.name != host}
        number = -2 if ledger.current is None else ledger.current.number
        return sum(
            worker.has_asked and worker.last_round != number and worker.slot < usable.get(worker.host, 0)
            for worker in ledger.living()
        )

    def _check_commits(self, number: int, actions: Sequence[do.Action]) -> None:
        """Check that the round which swaps the substitutes in has all that was committed."""
        ledger = self.ledger
        before = ledger.rounds.get(number - 1)
        if before is None or before.is_broken or not ledger.living():
            return
        members = [ledger.workers[action.launch.seat] for action in actions if isinstance(action, do.Assign)]
        newest = max(worker.commit for worker in members)
        holders = [worker.commit for worker in ledger.living() if worker.last_round == number - 1]
        best = max(holders, default=newest)
        assert newest >= best, f"a move loses commit {best}: the next round begins at {newest}"

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        if world.engine.phase is not Phase.RUNNING or world.is_late:
            self._gone_since = self._needed_since = self._lost_since = None
            return
        assert ledger.now <= max(self._due, world.asleep_until + _LONGEST), (
            f"the move of {self._host} does not end"
        )
        is_gone = self._has_followed and ledger.current is not None and not ledger.current.is_broken
        is_gone = is_gone and all(worker.host != self._host for worker in ledger.workers.values())
        self._gone_since = (self._gone_since or ledger.now) if self._is_leaving and is_gone else None
        assert self._gone_since is None or ledger.now <= self._gone_since + _SOON, (
            f"{self._host} has no workers any more, and its move goes on"
        )
        is_lost = self._host is not None and self._is_leaving and not self._has_followed
        is_lost = is_lost and self._count_substitutes(self._host or "") < self._leaving
        self._lost_since = (self._lost_since or ledger.now) if is_lost else None
        assert self._lost_since is None or ledger.now <= self._lost_since + _SOON, (
            f"{self._host} is left, and its substitutes are lost"
        )
        self._retired = {name for name in self._retired if ledger.host(name).until == math.inf}
        listed = [host for host in ledger.hosts.values() if host.is_listed]
        slots = sum(host.slots for host in listed if host.until < math.inf)
        is_needed = slots < world.options.min_np and any(host.name in self._retired for host in listed)
        self._needed_since = (self._needed_since or ledger.now) if is_needed else None
        assert self._needed_since is None or ledger.now <= self._needed_since + _SOON, (
            f"{self._retired} are left out for a move, and needed"
        )
