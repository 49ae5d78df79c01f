"""Stops: when a job ends, every living worker is told to, also those that still start; a second interrupt kills."""

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.lifecycle import WITH_WORKERS, Phase
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Stops"]

_IMPATIENCE = 2.0
"""Seconds after the second interrupt, after which a third one ends the wait."""


class Stops(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._phase = Phase.CONNECTING
        self._killing_since: float | None = None
        """Time of the second interrupt, which kills."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        if isinstance(event, on.UserSignal):
            self._check_signal(actions)
        if not isinstance(event, on.Interrupted) or self._phase is not Phase.STOPPING:
            return
        since = self._killing_since = self._killing_since or self.ledger.now
        if self.world.engine.phase is Phase.STOPPING:
            assert self.ledger.now < since + _IMPATIENCE, "whoever interrupts again and again still waits"
            killed = {action.host for action in actions if isinstance(action, do.Stop) and _kills(action)}
            hosts = {worker.host for worker in self.ledger.workers.values()}
            left = {name for name in hosts - killed if self.ledger.host(name).link == "ready"}
            assert not left, f"an interrupt leaves the workers of {left} their grace"

    def _check_signal(self, actions: Sequence[do.Action]) -> None:
        """Check that a signal of the user is passed on to all workers."""
        if self.world.engine.phase not in WITH_WORKERS:
            return
        signalled = {action.host for action in actions if isinstance(action, do.Signal)}
        hosts = {worker.host for worker in self.ledger.workers.values()}
        left = {name for name in hosts - signalled if self.ledger.host(name).link == "ready"}
        assert not left, f"the workers of {left} don't get the user's signal"

    def after(self) -> None:
        self._phase = self.world.engine.phase
        if self._phase in (Phase.FINISHING, Phase.STOPPING):
            left = next(self.ledger.living(), None)
            assert left is None, f"{left} was not told that the job ends"


def _kills(stop: do.Stop) -> bool:
    return stop.steps[0].signal == signal.SIGKILL and stop.steps[0].after == 0.0
