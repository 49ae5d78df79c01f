"""Silence: a silent worker is found in time, and no worker is killed for its host's link."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import Phase
from tests.simulation.laws.law import Law
from tests.simulation.ledger import Worker

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Silence"]

_SLACK = 1.0
_LOOK = 1.0


class Silence(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._next = 0.0
        self._timeout = world.options.worker_timeout
        self._most = world.spec.lease + 2 * self._timeout

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            match action:
                case tell.WorkerKilled(why.WorkerHangs(_, name, "silent")):
                    workers = [worker for worker in self.ledger.workers.values() if worker.host == name]
                    assert any(map(self._may_be_killed, workers)), f"a worker of {name} is killed for nothing"

    def _may_be_killed(self, worker: Worker) -> bool:
        """True if the worker hangs or is gone, or was silent for the longest time allowed to any host."""
        silent = 0.0 if worker.beat_at is None else self.ledger.now - worker.beat_at
        is_there = self.world.workers.find(worker.host, worker.slot, worker.start) is not None
        hangs = str(worker) in self.world.workers.hung or not is_there or self._looks_so(worker)
        return silent > (self._timeout if hangs else self._most)

    def _looks_so(self, worker: Worker) -> bool:
        """True if its beats were lost while others were heard, or it has no others; or all were lost for twice the time."""
        others = [
            other.beat_at
            for other in self.ledger.living()
            if other.beat_at is not None and other is not worker
        ]
        now, since = self.ledger.now, worker.beat_at or 0.0
        were_heard = bool(others) and max(others) - since >= self._timeout / 2
        is_long = now - since > 2 * self._timeout
        return now < self.world.beats_from + 3 * self._timeout and (were_heard or not others or is_long)

    def after(self) -> None:
        world, now = self.world, self.ledger.now
        if now < self._next or world.is_late or world.engine.phase is not Phase.RUNNING:
            return
        self._next = now + _LOOK
        for worker in self.ledger.living():
            if worker.beat_at is None:
                continue
            since = max(worker.beat_at, world.asleep_until)
            has_answered = self.ledger.host(worker.host).answers_since <= since
            most = (2 * self._timeout if has_answered else self._most) + self._timeout / 8 + _SLACK
            assert now <= since + most, f"{worker} is silent for {most:g} s, and lives"
