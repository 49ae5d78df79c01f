"""What a worker's end, a lost host, or silence leads to: the next round, or the end of the job. Pure."""

import signal
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hvlaunch.errors import HostError, HvlaunchError, NotEnoughSlots, Unreachable
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import causes as why
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.actions import Action, Step
from hvlaunch.gloo.engine.cooldown import Cooldown
from hvlaunch.gloo.engine.pool import HostState, Pool, PoolHost
from hvlaunch.gloo.engine.round import FRUITLESS_IN_A_ROW, Restarts, Round, RoundState
from hvlaunch.gloo.engine.rounds import Rounds
from hvlaunch.gloo.engine.workers import AT_ONCE, Worker, gently
from hvlaunch.job import JobSpec, WorkerExit

__all__ = ["Ending", "Policy"]

_STRIKES = 2
_SLOT_COOLDOWN = (1.0, 300.0)
_QUOTED = 200
"""Characters of a worker's own words that are told."""
_CONNECT_COOLDOWN = (5.0, 300.0)
"""For hosts that were discovered, and may still boot."""


class Ending(NamedTuple):
    """Why a job ends before its time: an error, or a worker's failure."""

    error: HvlaunchError | None = None
    failure: WorkerExit | None = None
    cause: why.RestartsUsedUp | why.NoProgress | why.StartsFailed | None = None
    """Why nothing is made up for."""


class Policy:
    """Decides. `ending` is set when the job is to end, `is_done` when the first worker has ended well."""

    def __init__(self, spec: JobSpec, pool: Pool, rounds: Rounds) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self._rounds = rounds
        self._workers = rounds.workers
        self._restarts = Restarts(spec.elastic)
        self.ending: Ending | None = None
        self.is_done = False

    @property
    def _round(self) -> Round | None:
        return self._rounds.round

    # Workers

    def record_end(
        self, worker: Worker, event: on.WorkerExited | on.WorkerNotStarted, now: float
    ) -> WorkerExit:
        """A worker is no more."""
        is_member = self._rounds.is_member(worker)
        current = self._round if is_member or self._has_left(worker) else None
        end = worker.ended(event, current.started_at if current is not None else worker.born_at, now)
        self._workers.end(worker)
        self._rounds.changed()
        if current is not None and (is_member or end.stopped):
            current.add(end)
            current.staying.discard(worker.seat)
        return end

    def _has_left(self, worker: Worker) -> bool:
        """Whether it was in the round that there is, or was, and waits for the next."""
        return self._round is not None and worker.is_waiting and worker.last_round == self._round.number

    def worker_ended(
        self, worker: Worker, event: on.WorkerExited | on.WorkerNotStarted, now: float
    ) -> list[Action]:
        """A worker is no more: what follows."""
        is_member = self._rounds.is_member(worker)
        end = self.record_end(worker, event, now)
        if self._elastic is None:
            return [] if end.ok else self._fail(_ended(end), now)
        if end.stopped or (worker.is_ending and not end.ok):
            return []
        if end.ok and (worker.has_state or (is_member and not self._rounds.is_asking)):
            return self._finish(now)
        if is_member:
            return self._fail(_ended(end), now, host=worker.host)
        return [] if worker.has_state else self._start_failed(worker, end, now)

    def _finish(self, now: float) -> list[Action]:
        """Training is done: the others of the round get some time to end, everybody else ends now."""
        if self._elastic is None or self.is_done:
            return []
        self.is_done = True
        members = [one for one in self._workers if self._rounds.is_member(one) and not one.is_ending]
        waiting = self._workers.waiting
        known = {*members, *waiting}
        starting = [one for one in self._workers if one not in known and not one.is_ending]
        return [
            *self.leave(waiting, why.TrainingDone(), now),
            *self.stop(starting, gently(self._spec.grace), now),
            *self.stop(members, gently(self._spec.grace, self._elastic.exit_grace), now),
        ]

    def _start_failed(self, worker: Worker, end: WorkerExit, now: float) -> list[Action]:
        """It ended before it was ever in a round."""
        cooldown = self._workers.cooldowns.setdefault(worker.seat, Cooldown())
        seconds = cooldown.begin(now, _SLOT_COOLDOWN)
        host = self._pool.get(worker.host)
        actions: list[Action] = [tell.WorkerStartFailed(_ended(end), worker.slot, seconds)]
        if host is None:
            return actions
        host.strikes += 1
        has_members = any(self._rounds.is_member(one) for one in self._workers.on(worker.host))
        if host.strikes >= _STRIKES and not has_members and self._can_do_without(host, now):
            return self.exclude(host, why.WorkersFail(_ended(end)), now)
        is_needed = self._round is None or self._round.state is RoundState.BROKEN
        if is_needed and cooldown.count >= FRUITLESS_IN_A_ROW:
            self.ending = Ending(failure=end, cause=why.StartsFailed(cooldown.count))
        return actions

    def asked(self, worker: Worker, event: on.WorkerAsked, now: float) -> list[Action]:
        """A worker wants a place."""
        if self.is_done:
            return [] if worker.is_leaving else self.leave([worker], why.TrainingDone(), now)
        was_in = worker.round
        if not self._rounds.asked(worker, event.round, event.commit):
            return []
        current = self._round
        if current is None or was_in != current.number:
            return []
        if current.state is RoundState.RUNNING and event.cause is None and self._elastic is not None:
            current.leave_by = now + self._elastic.exit_grace
            worker.commit = event.commit  # of the new one
            return self._rounds.change(why.NewTraining())
        if current.state is RoundState.RUNNING:
            words = (event.cause or "")[:_QUOTED]
            return self._fail(why.WorkerLeft(worker.rank, worker.host, words), now)
        if current.leave_by is None and self._elastic is not None:
            current.leave_by = now + self._elastic.reset_timeout
        return []

    def hangs(self, worker: Worker, how: Literal["silent", "stopped", "late"], now: float) -> list[Action]:
        """A worker does not do what it should: it is killed, and counts as failed."""
        seconds = None if how == "late" or self._elastic is None else self._elastic.worker_timeout
        cause = why.WorkerHangs(worker.rank, worker.host, how, seconds)
        worker.has_failed = True
        failed: list[Action] = []
        if self._rounds.is_member(worker):
            failed = self._fail(cause, now, host=worker.host)
        if self.ending is not None and self.ending.error is None and self._round is not None:
            when = now - self._round.started_at  # its host may be gone before its end is heard of
            killed = WorkerExit(rank=worker.rank, host=worker.host, signal=signal.SIGKILL, when=when)
            self.ending = self.ending._replace(failure=killed)
        return [tell.WorkerKilled(cause), *failed, *self.stop([worker], AT_ONCE, now)]

    def no_commit(self, now: float) -> list[Action]:
        """The round gets nowhere: whoever hangs in it will not leave it either."""
        seconds = None if self._elastic is None else self._elastic.commit_timeout
        return [] if seconds is None else self._fail(why.NoCommit(seconds), now)

    def stop(self, workers: Sequence[Worker], steps: Sequence[Step], now: float) -> list[Action]:
        """End these workers."""
        by_host: dict[str, list[int]] = {}
        for worker in workers:
            by_host.setdefault(worker.host, []).append(worker.slot)
            self._workers.stop(worker, steps, now)
            if self._rounds.is_asking and self._round is not None and self._rounds.is_member(worker):
                self._round.staying.discard(worker.seat)
        return [do.Stop(host, steps, slots) for host, slots in by_host.items()]

    def leave(self, workers: Sequence[Worker], cause: why.Cause, now: float) -> list[Action]:
        """Tell workers that wait for a place that there is none, and end those that don't mind."""
        for worker in workers:
            worker.is_leaving = True
        orders: list[Action] = [do.Leave(one.host, one.slot, one.start, cause) for one in workers]
        return orders + self.stop(workers, gently(self._spec.grace, self._spec.grace), now)

    # Rounds

    def _fail(
        self, cause: why.Cause, now: float, *, host: str | None = None, error: HostError | None = None
    ) -> list[Action]:
        """The round has failed: a worker's end (`host` is where), or the loss of a host (`error`)."""
        current = self._round
        if current is None:
            return []
        is_news = current.state is not RoundState.BROKEN
        fruitful = None if error is not None else current.is_fruitful(now)
        current.is_unknown = current.is_unknown or error is not None
        aside: list[Action] = []
        if host is not None and current.culprit is None:
            current.culprit = host
            current.cause = cause  # its peers may have left before, for what they saw of it
            if isinstance(cause, why.WorkerEnded | why.WorkerHangs):
                aside = self._strike(host, cause, now, fruitful=bool(fruitful))
        if not is_news:
            return aside
        end = self._restarts.failed(now, fruitful=True if aside or current.follows_gain else fruitful)
        if end is not None:
            self.ending = Ending(error=error, cause=None if self._elastic is None else end)
            return []
        return self.break_round(cause, now) + aside

    def break_round(self, cause: why.Cause, now: float) -> list[Action]:
        """Its workers are to leave the round at once; those that never ask are stopped."""
        current = self._round
        if current is None or self._elastic is None or current.state is RoundState.BROKEN:
            return []
        current.state, current.cause = RoundState.BROKEN, cause
        self._rounds.changed()
        if self._rounds.is_asking:
            current.leave_by = now + self._elastic.reset_timeout
            return [do.Break(current.number, cause)]
        return self.stop_round(now)

    def stop_round(self, now: float) -> list[Action]:
        """Stop the workers of a round that never ask, so that they can be started anew."""
        if self._round is None:
            return []
        living = [one for one in self._workers if not one.is_ending]
        if not living or self._round.cause is None:
            return []
        ending = tell.RoundEnding(self._round.number, self._round.cause)
        return [ending, *self.stop(living, gently(self._spec.grace), now)]

    # Hosts

    def _strike(
        self, name: str, cause: why.WorkerEnded | why.WorkerHangs, now: float, *, fruitful: bool
    ) -> list[Action]:
        host = self._pool.get(name)
        if host is None or self._elastic is None:
            return []
        host.strikes = 1 if fruitful else host.strikes + 1
        if host.strikes < _STRIKES or not self._can_do_without(host, now):
            return []
        return self.exclude(host, why.WorkersFail(cause), now)

    def _can_do_without(self, host: PoolHost, now: float) -> bool:
        """Whether the other hosts have enough slots."""
        others = [other for other in self._pool if other is not host and other.is_usable(now)]
        return self._pool.capacity(others) >= self._rounds.least

    def wanted_hosts(self, now: float) -> list[PoolHost]:
        """Those to be connected: where workers are, then those that are ready, then others, until the slots will do."""
        spares = self._elastic.spares if self._elastic is not None else 0
        ranks = {HostState.READY: 1, HostState.CONNECTING: 2}
        able = [
            host
            for host in self._rounds.in_order(self._pool)
            if host.listed and not host.cooldown.holds(now) and host.state is not HostState.CLOSING
        ]
        able.sort(key=lambda host: 0 if self._workers.on(host.name) else ranks.get(host.state, 3))
        wanted: list[PoolHost] = []
        slots = 0
        for host in able:
            if slots >= self._rounds.most + spares:
                break
            wanted.append(host)
            slots += self._pool.slots(host)
        return wanted

    def exclude(self, host: PoolHost, cause: why.Cause, now: float) -> list[Action]:
        """Use the host no more until its cool-down is over."""
        bounds = None if self._elastic is None else self._elastic.cooldown
        seconds = self._pool.exclude(host, now, bounds)
        host.strikes = _STRIKES - 1  # one more when it is back, and it is excluded for longer
        self._workers.forget_waits(host.name, now)
        self._rounds.changed()
        there = [one for one in self._workers.on(host.name) if not one.is_ending]
        excluded = tell.HostExcluded(host.name, seconds, cause)
        return [excluded, *self.stop(there, gently(self._spec.grace), now)]

    def host_failed(self, host: PoolHost, error: HostError, now: float) -> list[Action]:
        """The host could not be connected."""
        if self._elastic is None:
            return []
        bounds = self._elastic.cooldown
        if bounds is None and self._elastic.discovers:
            bounds = _CONNECT_COOLDOWN
        return [tell.HostNotUsable(error.problem, self._pool.exclude(host, now, bounds))]

    def host_lost(self, host: PoolHost, error: HostError, now: float) -> list[Action]:
        """The host is gone, or going, with all its workers; in the end its agent hears nobody, and stops them itself."""
        workers = self._workers.on(host.name)
        members = [one for one in workers if self._rounds.is_member(one)]
        if not host.is_parting:
            self._workers.lose(host.name)
        self.agent_ends(host.name, now)
        cause = why.HostProblem(error.problem)
        excluded = self.exclude(host, cause, now)[:1] if self._elastic is not None else []
        self._rounds.lost(host.name, members)
        failed = self._fail(cause, now, error=error) if members else []
        return excluded + failed

    def agent_ends(self, host: str, now: float) -> None:
        """Note that the host's agent ends its workers on its own account."""
        for worker in self._workers.on(host):
            worker.is_agents = True
            self._workers.stop(worker, gently(self._spec.grace), now)

    def blame(self, problem: HvlaunchError, now: float) -> list[Action]:
        """Hosts can't work together: one of them is excluded, or the job ends."""
        culprit = problem.host
        hosts = self._rounds.next_hosts
        if isinstance(problem, Unreachable) and hosts and culprit == hosts[0]:
            culprit = problem.other
        host = self._pool.get(culprit) if culprit is not None else None
        if self._elastic is None or host is None:
            self.ending = Ending(error=problem)
            return []
        if isinstance(problem, HostError):
            self._pool.errors[host.name] = problem
        return self.exclude(host, why.HostProblem(problem.problem), now)

    def drain(self, now: float) -> list[Action]:
        """Workers whose slot has left the pool: those of a round get some time to reach a commit."""
        if self._elastic is None:
            return []
        wanted: list[Action] = []
        survivors = None
        for worker in list(self._workers):
            if worker.is_ending or self._rounds.is_wanted(worker, now):
                if worker.drain_until is not None:
                    self._workers.drain(worker, None)
                continue
            if worker.drain_until is None:
                self._workers.drain(worker, now + self._elastic.drain_timeout)
            is_due = worker.drain_until is not None and now >= worker.drain_until
            cause = why.SlotGone(worker.host)
            if worker.is_waiting:
                if survivors is None:
                    survivors = any(
                        one.has_state and self._rounds.is_wanted(one, now) for one in self._workers
                    )
                if survivors or is_due or not worker.has_state:
                    wanted += self.leave([worker], cause, now)
                    self._rounds.changed()
            elif is_due or not self._rounds.is_member(worker):
                if self._rounds.is_member(worker):
                    wanted += self.break_round(cause, now)
                if not worker.is_ending:
                    wanted += self.stop([worker], gently(self._spec.grace), now)
        return wanted

    def find_hopeless(self) -> None:
        """End the job where there will never be enough slots again."""
        if self._elastic is None or self._elastic.discovers or self._pool.connecting:
            return
        if self._round is not None and self._round.state is RoundState.RUNNING:
            return
        left = self._pool.capacity([host for host in self._pool if not host.cooldown.is_for_good])
        if left < self._elastic.min_np:
            self.ending = Ending(error=self._pool.failure or NotEnoughSlots(self._elastic.min_np, left))


def _ended(end: WorkerExit) -> why.WorkerEnded:
    return why.WorkerEnded(end.rank, end.host, end.code, end.signal, end.not_started)
