"""Stops: when a job ends, every living worker is told to, also those that still start; a second interrupt kills."""

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.lifecycle import Phase
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Stops"]


class Stops(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._phase = Phase.CONNECTING

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        if not isinstance(event, on.Interrupted) or self._phase is not Phase.STOPPING:
            return
        if self.world.engine.phase is Phase.STOPPING:
            killed = {action.host for action in actions if isinstance(action, do.Stop) and _kills(action)}
            hosts = {worker.host for worker in self.ledger.workers.values()}
            left = {name for name in hosts - killed if self.ledger.host(name).link == "ready"}
            assert not left, f"an interrupt leaves the workers of {left} their grace"

    def after(self) -> None:
        self._phase = self.world.engine.phase
        if self._phase in (Phase.FINISHING, Phase.STOPPING):
            left = next(self.ledger.living(), None)
            assert left is None, f"{left} was not told that the job ends"


def _kills(stop: do.Stop) -> bool:
    return stop.steps[0].signal == signal.SIGKILL and stop.steps[0].after == 0.0
