"""How workers go whose slot has left the pool: at their next commit, or when their time is over. Pure."""

from hvlaunch.engine import causes as why
from hvlaunch.engine.actions import Action
from hvlaunch.engine.life import State
from hvlaunch.engine.pool import Pool
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.stopping import gently
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.engine.workers import Worker
from hvlaunch.job import JobSpec

__all__ = ["Draining"]


class Draining:
    """Lets those of a round reach a commit, and ends who is left after --drain-timeout."""

    def __init__(self, spec: JobSpec, pool: Pool, rounds: Rounds, waits: Waits) -> None:
        self._waits = waits
        self._grace = spec.grace
        self._elastic = spec.elastic
        self._pool = pool
        self._rounds = rounds
        self._workers = rounds.workers

    def go_on(self, now: float) -> list[Action]:
        """Whatever is due for workers whose slot is gone; those whose slot is back may stay."""
        if self._elastic is None:
            return []
        actions: list[Action] = []
        for worker in list(self._workers):
            if worker.is_ending or self._pool.has_slot(worker.seat, now):
                self._waits.end(Wait.DRAINING, worker)
                continue
            if not self._waits.has(Wait.DRAINING, worker):
                self._waits.begin(Wait.DRAINING, worker, now + self._elastic.drain_timeout)
            is_due = self._waits.is_over(Wait.DRAINING, now, worker)
            actions += self._drain(worker, now, is_due=is_due)
        return actions

    def _drain(self, worker: Worker, now: float, *, is_due: bool) -> list[Action]:
        """Let the worker go, if nothing is lost by it or its time is over."""
        cause = why.SlotGone(worker.host)
        if worker.state is State.WAITING:
            if not (is_due or not worker.has_state or self._has_survivors(now)):
                return []
            self._rounds.changed()
            return [*self._workers.dismiss([worker], cause, self._grace, now)]
        is_member = self._rounds.is_member(worker)
        if is_member and not is_due:
            return []
        actions = self._rounds.break_off(cause, now) if is_member else []
        if not worker.is_ending:
            actions += self._workers.stop([worker], gently(self._grace), now)
        return actions

    def _has_survivors(self, now: float) -> bool:
        """Whether any worker that may stay has what new ones need."""
        return any(
            worker.has_state and self._pool.has_slot(worker.seat, now) for worker in self._workers.living
        )
