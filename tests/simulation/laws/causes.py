"""Causes: every round ends with a cause, and the reported cause is true."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Causes"]

_EPSILON = 1e-6


class Causes(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._formed = 0

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            if isinstance(action, do.Break | do.Change | tell.RoundEnding):
                given_up = {action.host for action in actions if isinstance(action, do.Abandon)}
                moving = {action.host for action in actions if isinstance(action, tell.HostMoving)}
                self._check(action.cause, event, given_up, moving)
            elif isinstance(action, tell.RoundFormed):
                assert action.cause is not None or not self._formed, "a round without a cause"
                self._formed += 1

    def _check(self, cause: why.Cause, event: on.Event, given_up: set[str], moving: set[str]) -> None:
        ledger, options = self.ledger, self.world.options
        match cause:
            case why.MoreWorkers(more):
                assert more >= 1
                usable = {host.name: host.slots for host in ledger.usable()}
                waiting = [
                    worker
                    for worker in ledger.living()
                    if worker.has_asked and worker.slot < usable.get(worker.host, 0)
                ]
                members = 0 if ledger.current is None else len(ledger.current.members)
                is_room = len(waiting) >= more if ledger.is_asking else sum(usable.values()) >= members + more
                assert is_room, f"there are no {more} more workers"
            case why.WorkersToLeave(names):
                for name in names:
                    if name in moving:
                        continue
                    host = ledger.host(name)
                    slots = host.slots if host.is_usable(ledger.now) else 0
                    leaving = [
                        worker for worker in ledger.living() if worker.host == name and worker.slot >= slots
                    ]
                    assert leaving, f"no worker of {name} has to leave"
            case why.SlotGone(name):
                host = ledger.host(name)
                is_small = any(
                    worker.slot >= host.slots for worker in ledger.workers.values() if worker.host == name
                )
                assert is_small or not host.is_usable(ledger.now), f"{name} has its slots"
            case why.WorkerEnded(_, name, code, signal, _):
                same = [
                    worker
                    for worker in ledger.ends
                    if (worker.host, worker.code, worker.signal) == (name, code, signal)
                ]
                assert same, f"no worker of {name} ended with {code or signal}"
            case why.HostProblem(problem):
                assert problem.host is not None
                assert problem.host in given_up or ledger.host(problem.host).problems, (
                    f"{problem.host} is well"
                )
            case why.NoCommit(seconds):
                current = ledger.current
                assert current is not None
                left_in_it = [worker for worker in ledger.living() if worker.round == current.number]
                assert left_in_it, "who has left the round could not commit"
                since = max(current.began_at, current.commit_at)
                assert since + seconds <= ledger.now + _EPSILON, "the round had no time for a commit"
            case why.NotMet(_, _, seconds):
                assert seconds == options.reset_timeout
            case why.WorkerLeft():
                assert isinstance(event, on.WorkerAsked)
                assert event.cause is not None, "it was told to leave"
