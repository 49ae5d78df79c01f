"""Holds: a pool that flaps restarts unmodified workers ever less often; first rounds wait for workers that start."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Holds"]

_LEAST, _MOST = 15.0, 240.0
_FIRST = 30.0
"""Seconds for which the first round waits for workers that still start."""
_EPSILON = 1e-6


class Holds(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._seconds = 0.0
        """Time for which a round may not end for a change."""
        self._asked_at = math.inf
        self._probed_at = math.inf
        """Time of the newest plan that was probed: workers that start later are not waited for."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        ledger, now = self.ledger, self.ledger.now
        if isinstance(event, on.WorkerAsked):
            self._asked_at = min(self._asked_at, now)
        for action in actions:
            is_change = isinstance(action, tell.RoundEnding) and isinstance(
                action.cause, why.MoreWorkers | why.WorkersToLeave
            )
            if is_change and ledger.current is not None:
                self._check_held(now - ledger.current.began_at)
            elif isinstance(action, do.Probe):
                self._probed_at = now
            elif isinstance(action, tell.RoundFormed):
                self._check_gathered(action, actions)

    def _check_held(self, lasted: float) -> None:
        assert lasted >= self._seconds - _EPSILON, (
            f"workers are stopped for a change after {lasted:.1f} s, not {self._seconds:g}"
        )
        is_calm = lasted >= max(_LEAST, 2 * self._seconds)
        self._seconds = 0.0 if is_calm else min(_MOST, max(_LEAST, 2 * self._seconds))

    def _check_gathered(self, formed: tell.RoundFormed, actions: Sequence[do.Action]) -> None:
        members = {action.launch.seat for action in actions if isinstance(action, do.Assign)}
        living = list(self.ledger.living())
        has_survivor = any(
            worker.last_round >= 0 for worker in living if (worker.host, worker.slot) in members
        )
        is_full = formed.workers == self.world.options.max_np
        stopped = {
            (action.host, slot)
            for action in actions
            if isinstance(action, do.Stop)
            for slot in action.slots or ()
        }
        late = [
            worker
            for worker in living
            if worker.started_at < self._probed_at
            and not worker.has_asked
            and worker.round is None
            and (worker.host, worker.slot) not in stopped
        ]
        is_due = self.ledger.now >= self._asked_at + _FIRST - _EPSILON
        assert has_survivor or is_full or not late or is_due, f"the first round does not wait for {late[0]}"
