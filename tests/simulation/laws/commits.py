"""Commits: a job loses at most the work of a round, as long as a worker with it lives."""

import math
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

__all__ = ["Commits"]


_SLACK = 1.0


class Commits(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._may_hand_over_since = math.inf

    def after(self) -> None:
        self._check_hand_over()
        self._check_commit_timeout()

    def _check_hand_over(self) -> None:
        """Check that workers that all have to leave are told to hand their state over once enough others wait for it."""
        world, ledger, current = self.world, self.ledger, self.ledger.current
        is_running = world.engine.phase is Phase.RUNNING and ledger.is_asking and not world.is_late
        if current is None or not is_running or current.is_broken or current.is_changing:
            self._may_hand_over_since = math.inf
            return
        living = list(ledger.living())
        members = [worker for worker in living if worker.round == current.number]
        others = [worker for worker in living if worker.has_asked and self._has_slot(worker)]
        may_hand_over = len(others) >= world.options.min_np and not any(map(self._has_slot, members))
        if not members or not may_hand_over:
            self._may_hand_over_since = math.inf
            return
        self._may_hand_over_since = min(self._may_hand_over_since, ledger.now)
        assert ledger.now <= self._may_hand_over_since + _SLACK, (
            f"{members[0]} has to leave, {others[0]} waits, and the state is not handed over"
        )

    def _check_commit_timeout(self) -> None:
        """Check that a round without commits is broken in time, unless all of its workers have done their training."""
        world, current, seconds = self.world, self.ledger.current, self.world.options.commit_timeout
        if seconds is None or current is None or not self.ledger.is_asking or world.is_late:
            return
        if current.is_broken or world.engine.phase is not Phase.RUNNING:
            return
        since = max(current.commit_at, world.asleep_until)
        if self.ledger.now <= since + seconds + _SLACK:
            return
        members = [worker for worker in self.ledger.living() if worker.round == current.number]
        processes = [world.workers.find(worker.host, worker.slot, worker.start) for worker in members]
        training = [process for process in processes if process and process.commit < world.workers.goal]
        assert not training, f"{training[0]} trains without a commit for {seconds:g} s, and goes on"

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        leaves = [
            action
            for action in actions
            if isinstance(action, do.Leave) and isinstance(action.cause, why.SlotGone)
        ]
        left = {(worker.host, worker.slot) for worker in leaves}
        if left:
            self._check_leaves(left)
        if not any(isinstance(action, tell.RoundFormed) for action in actions):
            return
        ledger = self.ledger
        given_up = {action.host for action in actions if isinstance(action, do.Abandon)}
        killed = {
            (action.cause.host, action.cause.rank)
            for action in actions
            if isinstance(action, tell.WorkerKilled)
        }
        members = [ledger.workers[action.launch.seat] for action in actions if isinstance(action, do.Assign)]
        newest = max(worker.commit for worker in members)
        kept = [
            min(worker.commit, ledger.rounds[worker.last_round].base)
            for worker in ledger.living()
            if worker.has_asked
            and worker.last_round in ledger.rounds
            and (worker.host, worker.slot) not in left
            and worker.host not in given_up
            and (worker.host, worker.rank) not in killed
        ]
        assert newest >= max(kept, default=-1), f"training goes back to commit {newest}, from {max(kept)}"
        if not any(worker.last_round >= 0 and self._has_slot(worker) for worker in members):
            leaving = [
                worker
                for worker in ledger.living()
                if worker.has_asked
                and worker.last_round >= 0
                and (worker.host, worker.slot) not in left
                and worker.host not in given_up
                and (worker.host, worker.rank) not in killed
            ]
            latest = max((worker.commit for worker in leaving), default=newest)
            assert newest == latest, f"commit {newest} is handed over, and {latest} is there"

    def _has_slot(self, worker: Worker) -> bool:
        host = self.ledger.host(worker.host)
        return host.is_usable(self.ledger.now) and worker.slot < host.slots

    def _check_leaves(self, seats: set[tuple[str, int]]) -> None:
        """Check that a worker with needed state stays until its time is over."""
        ledger = self.ledger
        holders = [worker for worker in ledger.living() if worker.last_round >= 0]
        left = [worker for worker in holders if (worker.host, worker.slot) not in seats]
        gone = [worker for worker in holders if (worker.host, worker.slot) in seats]
        if not gone or left:
            return
        options = self.world.options
        since = [self.world.hosts[worker.host].unlisted_since for worker in gone]
        due = [at is not None and ledger.now >= at + options.drain_timeout - 1e-6 for at in since]
        is_small = any(worker.slot >= ledger.host(worker.host).slots for worker in gone)
        is_excluded = any(ledger.now < ledger.host(worker.host).until for worker in gone)
        assert all(due) or is_small or is_excluded, "the last worker that has the state is dismissed"
