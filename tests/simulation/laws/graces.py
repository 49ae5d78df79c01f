"""Graces: a stopped worker has time to end; longer after its dismissal, and after another worker's good end."""

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import Phase
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Graces"]

_EPSILON = 1e-6


class Graces(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._phase = Phase.CONNECTING

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        grace = self.world.spec.grace - _EPSILON
        stops = [action for action in actions if isinstance(action, do.Stop)]
        dismissed = {(action.host, action.slot) for action in actions if isinstance(action, do.Leave)}
        for stop in stops:
            times = [step.after for step in stop.steps]
            assert times == sorted(times), f"{stop} goes back in time"
            assert stop.steps[-1].signal == signal.SIGKILL, f"{stop} does not end with SIGKILL"
            if stop.steps[0].signal != signal.SIGKILL:
                assert times[-1] - times[0] >= grace, f"{stop} has no grace"
            leaving = {slot for host, slot in dismissed if host == stop.host}
            if stop.slots is not None and leaving & set(stop.slots):
                assert times[0] >= grace, f"{stop.host} is told that it may end well, and stopped at once"
        is_broken = any(isinstance(action, do.Break | tell.RoundEnding) for action in actions)
        is_first_end = isinstance(event, on.WorkerExited) and event.code == 0
        if is_first_end and self._phase is Phase.RUNNING and not is_broken:
            self._check_exit_grace(stops)

    def _check_exit_grace(self, stops: Sequence[do.Stop]) -> None:
        """Check that the members of a round whose first worker has ended well may end by themselves."""
        if self.world.engine.phase is not Phase.FINISHING or self.ledger.current is None:
            return
        number, least = self.ledger.current.number, self.world.options.exit_grace - _EPSILON
        members = {(worker.host, worker.slot) for worker in self.ledger.living() if worker.round == number}
        for stop in stops:
            hurried = [
                slot for host, slot in members if host == stop.host and slot in (stop.slots or (slot,))
            ]
            assert not hurried or stop.steps[0].after >= least, (
                f"{stop.host}/{hurried[0]} has no time to end its training"
            )

    def after(self) -> None:
        self._phase = self.world.engine.phase
