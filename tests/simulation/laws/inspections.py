"""Stacks: workers killed for a failure are asked for stacks first, and get a signal within half a second."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law
from tests.simulation.ledger import Worker

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Inspections"]

_MOST = 0.45
_ROUNDING = 1e-6


class Inspections(Law):
    """`_due` has the latest time of each worker's first signal."""

    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._until = 0.0
        self._due: dict[Worker, float] = {}
        self._awaited: set[tuple[str, int]] = set()

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        now = self.ledger.now
        takes = [action for action in actions if isinstance(action, do.TakeStacks)]
        stops = [action for action in actions if isinstance(action, do.Stop)]
        if isinstance(event, on.Interrupted) and stops:
            assert not takes, "an interrupt waits for stacks"
            self._due.clear()
            self._awaited.clear()
        if isinstance(event, on.StacksTaken) and (event.host, event.number) in self._awaited:
            self._awaited.discard((event.host, event.number))
            if not self._awaited:
                self._check_release(stops)
        if takes and not (self._awaited and now < self._until):
            self._until = now + _MOST
            self._awaited.clear()
            self._due.clear()
        for take in takes:
            self._awaited.add((take.host, take.number))
            for worker in self._of(take):
                self._due.setdefault(worker, self._until)
        signalled = {worker: now + stop.steps[0].after for stop in stops for worker in self._of(stop)}
        for worker, at in signalled.items():
            due = self._due.get(worker)
            assert due is None or at <= due + _ROUNDING or now >= due, (
                f"{worker} is killed at {at:.2f}, not by {due:.2f}"
            )
        given_up = {action.problem.host for action in actions if isinstance(action, tell.HostLostAtEnd)}
        self._due = {worker: due for worker, due in self._due.items() if worker.host not in given_up}
        left = {worker for take in takes for worker in self._of(take)} - signalled.keys()
        assert not left, f"{left} are asked what they do, and not stopped"

    def _of(self, action: do.TakeStacks | do.Stop) -> list[Worker]:
        """Return the workers of a request; a Start in the same turn has not happened yet."""
        workers = self.ledger.workers.values()
        return [
            worker
            for worker in workers
            if worker.host == action.host and (action.slots is None or worker.slot in action.slots)
        ]

    def _check_release(self, stops: Sequence[do.Stop]) -> None:
        now = self.ledger.now
        at_once = {worker for stop in stops if not stop.steps[0].after for worker in self._of(stop)}
        for worker, due in self._due.items():
            is_there = self.ledger.workers.get((worker.host, worker.slot)) is worker
            assert worker in at_once or not is_there or now >= due, (
                f"all stacks are there, and {worker} goes on"
            )
