"""The consequences of a worker's end, a lost host or silence: the next round, or the end of the job. Pure.

A Decision has the actions, and says what follows; the engine does what follows.
"""

import signal
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.causes import Ending
from hvlaunch.engine.health import Health
from hvlaunch.engine.hosts import HostState, Pool, PoolHost
from hvlaunch.engine.lifecycle import AT_WORK, WITH_WORKERS, Lifecycle, Phase
from hvlaunch.engine.round import STARTS_IN_A_ROW, Round, RoundState, in_order, may_be_consequence
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Cooldown, Wait, Waits
from hvlaunch.engine.workers import AT_ONCE, Worker, WorkerState, WorkerTrigger, gently
from hvlaunch.errors import JobHung, NotEnoughSlots, Problem
from hvlaunch.job import ElasticOptions, JobSpec, WorkerExit
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.engine.moves import Moves
    from hvlaunch.engine.roles import RolePolicies

__all__ = ["Decision", "Policy", "Then", "alone"]

_STRIKES = 2
_SLOT_COOLDOWN = (1.0, 300.0)
_EVICTION_PAUSE = 300.0
"""Seconds between the moves of two slow hosts: the next samples show whether the first move has helped."""
_QUOTED = 200
"""Longest quotation of a worker's own words, in characters."""
_WITHOUT_PROGRESS = (why.NoCommit, why.JobHung, why.NotMet, why.WorkerHangs)
"""Causes with seconds in which nothing was done."""
_CONNECT_COOLDOWN = (5.0, 300.0)
"""Bounds for discovered hosts, which may still boot."""


class Then(IntEnum):
    """The engine's next step after a decision, the smallest first."""

    NOTHING = 0
    """Only the actions: the next round is as near as before."""
    ROUND = 1
    """A step towards the next round; hosts and workers did not change."""
    ALL = 2
    """Everything that a change of hosts or workers may need."""


class Decision(NamedTuple):
    """Actions, and whether the job continues."""

    actions: Sequence[Action] = ()
    ending: Ending | None = None
    """Set if the job is to end early."""
    is_done: bool = False
    """True if the training is done: the first worker has ended well."""
    then: Then = Then.ALL

    @property
    def is_empty(self) -> bool:
        return not (self.actions or self.ending or self.is_done)

    def also(self, other: "Decision") -> "Decision":
        """Combine two decisions; the first ending counts."""
        return Decision(
            (*self.actions, *other.actions),
            self.ending or other.ending,
            self.is_done or other.is_done,
            max(self.then, other.then),
        )


def alone(actions: Iterable[Action]) -> Decision:
    """Return a decision after which nothing else is due: no host or worker came, went or changed."""
    return Decision([*actions], then=Then.NOTHING)


class Policy:
    """Decides the consequences when workers or hosts fail, hang or leave."""

    def __init__(
        self,
        spec: JobSpec,
        pool: Pool,
        rounds: Rounds,
        lifecycle: Lifecycle,
        health: Health | None,
        waits: Waits,
    ) -> None:
        self._waits = waits
        self._lifecycle = lifecycle
        self._health = health
        self.hang: on.JobHangs | None = None
        """The newest report of a hang, as long as the job hangs."""
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self._rounds = rounds
        self._workers = rounds.workers
        self._restarts = rounds.restarts
        self._roles = _role_policies(spec, pool, rounds, waits) if spec.roles else None
        self._moves: Moves | None = None
        """None until a move is asked for."""
        self._evicted: dict[str, float] = {}
        """Times at which slow hosts were to move."""

    @property
    def _round(self) -> Round | None:
        return self._rounds.round

    # Workers

    def worker_ended(self, event: on.WorkerExited | on.WorkerNotStarted, now: float) -> Decision:
        """Record a worker's end, and decide its consequences."""
        worker = self._workers.find((event.host, event.slot), event.start)
        if worker is None or worker.born != event.round or self._lifecycle.phase not in WITH_WORKERS:
            return Decision(then=Then.NOTHING)
        if self._lifecycle.phase is not Phase.RUNNING:
            self._record_end(worker, event, now)
            if self._roles is not None and isinstance(self._lifecycle.ending.cause, why.RoleDone):
                self._roles.ended_after(worker)
            return Decision()
        decision = self._ended_at_work(worker, event, now)
        if decision.is_empty and self._rounds.awaits_ends:
            return Decision(then=Then.NOTHING)
        return decision

    def _record_end(
        self, worker: Worker, event: on.WorkerExited | on.WorkerNotStarted, now: float
    ) -> WorkerExit:
        """Record a worker's end, and return it with its cause."""
        is_member = self._rounds.is_member(worker)
        current = self._round if is_member or self._has_left(worker) else None
        exit_ = worker.ended(event, self._workers.began_at or 0.0, now)
        self._workers.remove(worker, now)
        self._rounds.changed()
        # A spare that fails says nothing of the round.
        if current is not None and (is_member or exit_.stopped):
            current.add(exit_)
        return exit_

    def _has_left(self, worker: Worker) -> bool:
        """True if the worker has left the current round, and asked for a place in the next."""
        current = self._round
        return current is not None and worker.round is None and worker.last_round == current.number

    def _ended_at_work(
        self, worker: Worker, event: on.WorkerExited | on.WorkerNotStarted, now: float
    ) -> Decision:
        """Record a worker's end while the job is at work, and decide its consequences."""
        is_member, is_ending = self._rounds.is_member(worker), worker.is_ending
        exit_ = self._record_end(worker, event, now)
        if self._elastic is None:
            return (
                self._static_ended(exit_, now)
                if self._roles is None
                else self._role_ended(worker, exit_, now)
            )
        # A worker that we stopped may still show that it was the cause.
        if exit_.stopped or (is_ending and not exit_.ok):
            return Decision(self._find_culprit(now))
        if exit_.ok and self._rounds.forming.has_trained(worker, is_member=is_member):
            is_early = self._rounds.forming.sees_commits and is_member and not worker.is_done
            early = [tell.WorkerEndedEarly(exit_.rank, exit_.host)] if is_early else []
            return self.settle(now).also(Decision(early)).also(self._finish(self._elastic, now))
        if is_member:
            return self._member_failed(exit_, now)
        return Decision() if worker.has_state else self._start_failed(worker, exit_, now)

    def _static_ended(self, exit_: WorkerExit, now: float) -> Decision:
        """Decide the consequences in a static job."""
        if not exit_.ok:
            return self._member_failed(exit_, now)
        if exit_.rank == self._spec.end_with_rank and self._workers.living:
            return Decision((), Ending(cause=why.RankDone(exit_.rank, exit_.host)))
        return Decision()

    def _role_ended(self, worker: Worker, exit_: WorkerExit, now: float) -> Decision:
        """Decide the consequences in a job with roles."""
        if self._roles is None:
            return Decision()
        step = self._roles.ended(worker, exit_, now)
        if step is None:
            return self._member_failed(exit_, now)
        return Decision(step) if isinstance(step, list) else Decision((), step)

    def restart(self, now: float) -> Decision:
        """Start the workers of roles again whose time has come."""
        step = [] if self._roles is None else self._roles.restart(now)
        return Decision(step) if isinstance(step, list) else Decision((), step)

    def _member_failed(self, exit_: WorkerExit, now: float) -> Decision:
        """Fail the round, at once or after a short wait for the cause of the failure."""
        current = self._round
        if current is None or not may_be_consequence(exit_):
            return self._fail(_ended(exit_), now, host=exit_.host)
        if current.state is RoundState.BROKEN:
            return Decision(self._find_culprit(now))
        # Nothing is stopped here, so the cause will show itself in any case.
        if not self._rounds.forming.stops_at_failure:
            return self._fail(_ended(exit_), now)  # none is stopped, so that the cause will show itself
        if not self._waits.has(Wait.SETTLING):
            self._waits.begin(Wait.SETTLING, None, now + self._spec.settle)
        # Without living members no other failure can come.
        others = any(self._rounds.is_member(worker) for worker in self._workers.living)
        return Decision() if others and not self._waits.is_over(Wait.SETTLING, now) else self.settle(now)

    def settle(self, now: float) -> Decision:
        """End the wait for the cause of the round's failure."""
        current = self._round
        if not self._waits.has(Wait.SETTLING) or current is None or current.failure is None:
            return Decision()
        if not may_be_consequence(current.failure):
            return self._fail(_ended(current.failure), now, host=current.failure.host)
        suspect = _ended(current.failure)
        # The workers are stopped now, but one of them may still report an error of its own.
        current.suspect_first(suspect)
        return self._fail(suspect, now).also(Decision(self._find_culprit(now)))

    def _find_culprit(self, now: float) -> list[Action]:
        """After the end of a stopped worker, check whether it was the cause, or whether no other cause can come."""
        current = self._round
        if (
            current is None
            or current.suspect is None
            or current.failure is None
            or current.culprit is not None
        ):
            return []
        is_over = not any(self._rounds.is_member(worker) for worker in self._workers)
        cause = _ended(current.failure)
        # Another worker that is still ending may turn out to be the cause.
        if cause == current.suspect and not is_over:
            return []
        current.convict(cause)
        actions = self._strike(cause.host, cause, now, fruitful=current.is_fruitful(now))
        if actions and self._is_remedy(cause.host, now):
            self._restarts.remedied()
        return actions

    def _finish(self, elastic: ElasticOptions, now: float) -> Decision:
        """End the job after training: members of the round get time to end, the other workers are stopped now."""
        members = [worker for worker in self._workers.living if self._rounds.is_member(worker)]
        waiting = self._workers.waiting
        # Workers that still import have no training to end.
        placed = {*members, *waiting}
        starting = [worker for worker in self._workers.living if worker not in placed]
        grace = self._spec.grace
        actions = [
            *self._workers.dismiss(waiting, why.TrainingDone(), grace, now),
            *self._workers.stop(starting, gently(grace), now),
            *self._workers.stop(members, gently(grace, elastic.exit_grace), now),
        ]
        return Decision(actions, is_done=True)

    def _start_failed(self, worker: Worker, exit_: WorkerExit, now: float) -> Decision:
        """Handle the end of a worker without any round."""
        cooldown = self._workers.cooldowns.setdefault(worker.seat, Cooldown())
        seconds = cooldown.begin(now, _SLOT_COOLDOWN)
        self._waits.begin(Wait.SLOT_COOLDOWN, worker.seat, cooldown.until)
        host = self._pool.get(worker.host)
        failed = [tell.WorkerStartFailed(_ended(exit_), worker.slot, seconds)]
        if host is None:
            return Decision(failed)
        host.strikes += 1
        # A host whose other workers run is not bad as a whole.
        has_members = any(self._rounds.is_member(other) for other in self._workers.on(worker.host))
        if host.strikes >= _STRIKES and not has_members and self._can_do_without(host, now):
            return Decision(self.exclude(host, why.WorkersFail(_ended(exit_)), now))
        # A running round does not need this slot, so the job may wait for it without end.
        is_needed = self._round is None or self._round.state is RoundState.BROKEN
        if is_needed and cooldown.count >= STARTS_IN_A_ROW:
            return Decision(failed, Ending(failure=exit_, cause=why.StartsFailed(cooldown.count)))
        return Decision(failed)

    def worker_event(self, event: on.WorkerAsked | on.WorkerSuspended, now: float) -> Decision:
        """Decide about a worker that asks for a place, or was stopped by a signal."""
        worker = self._workers.find((event.host, event.slot), event.start)
        if worker is None or self._health is None or self._lifecycle.phase not in AT_WORK or worker.is_ending:
            return Decision(then=Then.NOTHING)
        if isinstance(event, on.WorkerSuspended):
            return self._suspended(worker, now)
        # An old request, repeated by the network, is no sign of life: the worker may have sent its last beat.
        if not (self._rounds.forming.sees_commits and worker.is_beyond(event.round)):
            self._health.beat(worker, event.commit, now)
        is_first = not self._rounds.forming.sees_commits
        decision = self._asked(worker, event, now)
        if decision.ending is None and self._rounds.awaits_asks and not is_first:
            return alone(decision.actions)
        return decision

    def _asked(self, worker: Worker, event: on.WorkerAsked, now: float) -> Decision:
        """Handle an elastic worker's request for a place."""
        was_in = worker.round
        if self._elastic is None or not self._rounds.asked(worker, event.round, event.commit, now):
            return Decision()
        current = self._round
        # A spare that asks changes nothing for the round.
        if current is None or was_in != current.number:
            return Decision()
        if current.state is RoundState.RUNNING and event.cause is None:
            self._waits.begin(Wait.LEAVING, None, now + self._elastic.exit_grace)
            # Workers of earlier rounds are still in the training before, with its state.
            left = [other for other in self._workers.living if 0 <= other.last_round < current.number]
            stops = self._workers.stop(left, gently(self._spec.grace), now)
            return Decision([*self._rounds.change(why.NewTraining(), now), *stops])
        if current.state is RoundState.RUNNING:
            words = (event.cause or "")[:_QUOTED]
            return self._fail(why.WorkerLeft(worker.rank, worker.host, words), now)
        if not self._waits.has(Wait.LEAVING):
            self._waits.begin(Wait.LEAVING, None, now + self._elastic.reset_timeout)
        return Decision()

    def watch(self, now: float) -> Decision:
        """Find the hanging workers of a running round, and decide the consequences.

        All of them are killed before any of them is judged. So no host is excluded because of other workers that seem to have
        the state, and are killed too.
        """
        if self._health is None or self._lifecycle.phase is not Phase.RUNNING:
            return Decision()
        strays = self.stop_strays(now)
        silent = self._health.silent(now)
        late = [worker for worker in self._health.stragglers(now) if worker not in silent]
        # Kill all of them before judging: see above.
        kills = self._rounds.stacks.stop([*silent, *late], AT_ONCE, now, WorkerTrigger.HANGS)
        decision = Decision()
        for worker in silent:
            decision = decision.also(self._hangs(worker, "silent", now))
        if absent := self._health.absent(now):
            decision = decision.also(self.not_met(absent, now))
        if self._health.is_without_commit(now):
            decision = decision.also(self.no_commit(now))
        for worker in late:
            decision = decision.also(self._hangs(worker, "late", now))
        return decision.also(Decision([*kills, *strays]))

    def _suspended(self, worker: Worker, now: float) -> Decision:
        """Kill a worker that was stopped by a signal and not continued."""
        kill = self._rounds.stacks.stop([worker], AT_ONCE, now, WorkerTrigger.HANGS)
        return self._hangs(worker, "stopped", now).also(Decision(kill))

    def _hangs(self, worker: Worker, how: Literal["silent", "stopped", "late"], now: float) -> Decision:
        """Count a hanging worker, which is being killed, as failed."""
        options = self._elastic
        seconds = None
        if options is not None and how != "late":
            seconds = options.suspension if how == "stopped" else options.worker_timeout
        cause = why.WorkerHangs(worker.rank, worker.host, how, seconds)
        self._rounds.changed()
        failed = Decision()
        if self._rounds.is_member(worker):
            failed = self._fail(cause, now, host=worker.host)
        ending = failed.ending
        if ending is not None and ending.error is None and self._round is not None:
            when = now - (self._workers.began_at or now)  # its host may be gone before its end is heard of
            # The report needs an end, and the real one may never be heard of if the host is gone.
            killed = WorkerExit(rank=worker.rank, host=worker.host, signal=signal.SIGKILL, when=when)
            ending = ending._replace(failure=killed)
        return Decision([tell.WorkerKilled(cause), *failed.actions], ending)

    def judged(self, event: on.JobHangs | on.JobGoesOn, now: float) -> Decision:
        """Handle the verdict that the job hangs, or does not hang any more."""
        if self._lifecycle.phase not in (Phase.RUNNING, Phase.FINISHING):
            return Decision(then=Then.NOTHING)
        if isinstance(event, on.JobGoesOn):
            hung, self.hang = self.hang, None
            return alone([] if hung is None else [tell.JobGoingOn()])
        self.hang = event
        hanging = alone([tell.JobHanging(*event)])
        if self._spec.on_hang == "warn":
            return hanging
        self.hang = None
        return hanging.also(self._hung(event, now))

    def _hung(self, event: on.JobHangs, now: float) -> Decision:
        """Handle a hang of the whole job that the user does not want to wait for."""
        if self._elastic is not None and self._spec.on_hang == "restart":
            return self._fail(why.JobHung(event.seconds, event.text), now)
        return Decision((), Ending(error=JobHung(event.seconds, event.text).problem))

    def no_commit(self, now: float) -> Decision:
        """Break a round without commits: hanging workers never leave by themselves."""
        seconds = None if self._elastic is None else self._elastic.commit_timeout
        return Decision() if seconds is None else self._fail(why.NoCommit(seconds), now)

    def not_met(self, absent: Sequence[Worker], now: float) -> Decision:
        """Break a round whose workers have not all met in time."""
        seconds = 0.0 if self._elastic is None else self._elastic.reset_timeout
        ranks = tuple(worker.rank for worker in absent)
        return self._fail(
            why.NotMet(ranks, tuple(dict.fromkeys(worker.host for worker in absent)), seconds), now
        )

    # Rounds

    def _fail(
        self, cause: why.Cause, now: float, *, host: str | None = None, problem: Problem | None = None
    ) -> Decision:
        """Fail the round for a worker's end (at `host`) or for a lost host (`problem`)."""
        current = self._round
        if current is None:
            return Decision()
        is_news = current.state is not RoundState.BROKEN
        # A lost host says nothing about the workers, so its round counts neither way.
        fruitful = current.is_fruitful(now)
        has_progressed = self._has_progressed(current, cause, now, is_own=host is not None)
        excluded: list[Action] = []
        is_culprit = current.fail(cause, host=host, is_host_lost=problem is not None)
        if is_culprit and host is not None and isinstance(cause, why.WorkerEnded | why.WorkerHangs):
            excluded = self._strike(host, cause, now, fruitful=fruitful)
        if not is_news:
            return Decision(excluded)
        # A lost host says nothing about the workers, so its round counts neither way. The same holds for an exclusion: the
        # next round runs without the bad host. A host that comes back and is excluded again is no news.
        is_neutral = problem is not None or (bool(excluded) and self._is_remedy(host, now))
        if host is None and isinstance(cause, why.NotMet) and len(cause.hosts) == 1:
            host = cause.hosts[0]
        limit = self._restarts.failed(
            now, fruitful=has_progressed or (None if is_neutral else False), host=host
        )
        if limit is not None:
            if self._elastic is None:
                return Decision((), Ending(error=problem))
            return Decision(
                excluded[1:], Ending(error=problem, cause=limit)
            )  # its stops, which are under way
        return Decision([*self._rounds.break_off(cause, now), *excluded])

    def _has_progressed(self, current: Round, cause: why.Cause, now: float, *, is_own: bool) -> bool:
        """True if the failed round brought the job on. `is_own`: a worker failed by itself, and not for its peers."""
        reports = self._rounds.forming.sees_commits or self._rounds.reports_steps
        # Workers that report neither commits nor steps have only the time: a crash at the start comes early.
        if reports and (is_own or isinstance(cause, why.NoCommit | why.JobHung)):
            return current.has_progressed
        idle = cause.seconds if isinstance(cause, _WITHOUT_PROGRESS) else None
        return current.is_fruitful(now, lost=idle or 0.0)

    def _is_remedy(self, name: str | None, now: float) -> bool:
        """True if the exclusion of this host is a remedy: its first one, or one until a spare is there."""
        host = None if name is None else self._pool.get(name)
        return host is not None and (host.cooldown.count <= 1 or not self._can_do_without(host, now))

    # Hosts

    def _strike(
        self, name: str, cause: why.WorkerEnded | why.WorkerHangs, now: float, *, fruitful: bool
    ) -> list[Action]:
        host = self._pool.get(name)
        if host is None or self._elastic is None:
            return []
        # A fruitful round forgives earlier failures, but not this one.
        host.strikes = 1 if fruitful else host.strikes + 1
        if host.strikes < _STRIKES or not self._can_do_without(host, now, soon=True):
            return []
        # Until a spare has connected, the job needs the host, and tries it again if no spare comes.
        bounds = None if self._can_do_without(host, now) else _CONNECT_COOLDOWN
        return self.exclude(host, why.WorkersFail(cause), now, bounds)

    def _can_do_without(self, host: PoolHost, now: float, *, soon: bool = False) -> bool:
        """True if the other hosts have enough slots, and the host's workers are not the only ones with the state.

        `soon` also counts hosts that are connecting.
        """
        others = [
            other
            for other in self._pool
            if other is not host and (other.may_join(now) or (soon and other.is_coming(now)))
        ]
        return self._have_enough(others) and not self._alone_has_state(host)

    def _alone_has_state(self, host: PoolHost) -> bool:
        """True if only this host's workers have the state that the other workers need; a suspected host may be lost."""
        holders = {worker.host for worker in self._workers.living if worker.commit >= 0}
        others = holders - {host.name}
        return bool(holders) and all(self._pool[name].silent_for is not None for name in others)

    def needed_hosts(self, now: float) -> list[PoolHost]:
        """Return the hosts to connect, until their slots suffice: with workers first, then ready ones, then others."""
        spares = self._elastic.spares if self._elastic is not None else 0
        ranks = {HostState.READY: 1, HostState.CONNECTING: 2}
        able = [
            host
            for host in in_order(self._pool, self._round)
            if host.listed
            and not host.cooldown.holds(now)
            and host.state not in (HostState.PARTING, HostState.CLOSING)
        ]
        # Stable: hosts keep the pool's order within each rank.
        able.sort(key=lambda host: 0 if self._workers.on(host.name) else ranks.get(host.state, 3))
        able.sort(key=lambda host: host.name != self._pool.target)
        needed: list[PoolHost] = []
        slots = 0
        for host in able:
            if slots >= self._rounds.bounds.most + spares:
                break
            needed.append(host)
            # Another host takes the place of a moving host, and perhaps of a suspected host.
            is_leaving = host.name == self._pool.moving or host.silent_for is not None
            slots += 0 if is_leaving else self._pool.slots(host)
        return needed

    def exclude(
        self, host: PoolHost, cause: why.Cause, now: float, bounds: tuple[float, float] | None = None
    ) -> list[Action]:
        """Exclude the host for a cool-down with the option's bounds, or else with `bounds`."""
        given = None if self._elastic is None else self._elastic.cooldown
        bounds = given or bounds
        seconds = self._pool.exclude(host, now, bounds)
        # One more failure excludes the host again, for longer.
        host.strikes = _STRIKES - 1  # one more when it is back, and it is excluded for longer
        self._workers.forget_waits(host.name, now)
        self._rounds.changed()
        living = [worker for worker in self._workers.on(host.name) if not worker.is_ending]
        stops = self._rounds.stacks.stop(living, gently(self._spec.grace), now)
        return [tell.HostExcluded(host.name, seconds, cause), *stops]

    def host_failed(self, host: PoolHost, problem: Problem, now: float) -> list[Action]:
        """Handle a host that could not be connected."""
        if self._elastic is None:
            return []
        bounds = self._elastic.cooldown
        # A host that never worked is not retried for the rest of the job; one that is needed is.
        is_missed = host.was_ready and not self._can_do_without(host, now)
        if bounds is None and (self._elastic.discovers or is_missed):
            bounds = _CONNECT_COOLDOWN
        retry_in = self._pool.exclude(host, now, bounds)
        return [tell.HostNotUsable(problem, retry_in, self._others_do(host))]

    def host_lost(self, host: PoolHost, problem: Problem, now: float) -> Decision:
        """Handle the loss of a host, or its leaving. If it is lost, its agent hears no driver and stops the workers by itself."""
        has_members = any(self._rounds.is_member(worker) for worker in self._workers.on(host.name))
        if host.state is not HostState.PARTING:
            # A parting agent still reports the ends of its workers.
            self._workers.lose(host.name, now)
        self.agent_ends(host.name, now)
        cause = why.HostProblem(problem)
        excluded = self._exclude_lost(host, cause, now) if self._elastic is not None else []
        self._rounds.lost(host.name)
        if not has_members:
            return Decision(excluded)
        return Decision(excluded).also(self._fail(cause, now, problem=problem))

    # Suspected hosts

    def suspects(self, host: PoolHost, seconds: float) -> Decision:
        """Note the silence of a host."""
        if host.state is not HostState.READY or host.silent_for is not None:
            return Decision(then=Then.NOTHING)
        host.silent_for = seconds
        self._waits.end(Wait.RETURNING, host.name)
        self._rounds.changed()
        return Decision()

    def answers(self, host: PoolHost, now: float) -> Decision:
        """Note the answer of a suspected host: its workers may ask for a place in the next round."""
        if self._elastic is None or all(other.silent_for is None for other in self._pool):
            return Decision(then=Then.ROUND)
        if host.silent_for is None:
            return Decision()  # the others may have lacked this host
        host.silent_for, was_aside = None, host.is_aside
        host.is_aside = False
        self._rounds.changed()
        # Workers that asked before this answer was noted need no time limit.
        if self._aside(host):
            self._waits.begin(Wait.RETURNING, host.name, now + self._elastic.reset_timeout)
        return Decision([tell.HostTakenIn(host.name)] if was_aside else [])

    def set_aside(self, now: float) -> list[Action]:
        """Let the other hosts go on without the suspected hosts, if possible. No failure is counted."""
        if not self._rounds.forming.sees_commits:
            return []  # a restart of all workers costs more than the wait
        actions: list[Action] = []
        for host in self._pool:
            # Most hosts are not silent, and this is asked at each turn.
            if host.silent_for is None:
                continue
            members = [
                worker for worker in self._workers.on(host.name) if worker.state is WorkerState.WORKING
            ]
            if not members or not self._others_go_on(now):
                continue
            # Before they are set aside, when they have no round any more.
            is_member = any(self._rounds.is_member(worker) for worker in members)
            self._workers.set_aside(members, now)
            host.is_aside = True
            self._rounds.changed()
            actions.append(tell.HostSetAside(host.name, host.silent_for))
            if is_member:
                actions += self._rounds.break_off(why.HostSilent(host.name, host.silent_for), now)
        return actions

    def _others_go_on(self, now: float) -> bool:
        """True if the answering hosts have enough slots, and the state."""
        # A quiet host may be suspected next, since our own link may be cut.
        others = {
            host.name
            for host in self._pool
            if host.may_join(now) and not self._rounds.probing.is_silent(host.name)
        }
        least = -1 if self._round is None else self._round.least_commit
        has_state = least < 0 or any(
            worker.commit >= least and worker.host in others for worker in self._workers.living
        )
        return has_state and self._have_enough([self._pool[name] for name in others])

    def stop_strays(self, now: float) -> list[Action]:
        """Stop workers of returned hosts without a request for a place in time."""
        actions: list[Action] = []
        # They may hang in a collective of the old round, and their slots are needed.
        for host in self._pool.late(Wait.RETURNING, now):
            self._waits.end(Wait.RETURNING, host.name)
            actions += self._rounds.stacks.stop(self._aside(host), gently(self._spec.grace), now)
        return actions

    def _aside(self, host: PoolHost) -> list[Worker]:
        return [worker for worker in self._workers.on(host.name) if worker.state is WorkerState.ASIDE]

    def _exclude_lost(self, host: PoolHost, cause: why.HostProblem, now: float) -> list[Action]:
        """Exclude a lost host; retry one that the job needs, since our own network may have failed."""
        host.was_lost = True
        bounds = None if self._can_do_without(host, now) else _CONNECT_COOLDOWN
        return self.exclude(host, cause, now, bounds)[:1]

    # Moves

    def move_refusal(self, host: str, to: str | None, now: float) -> str | None:
        """Return why a host's workers can't move to another now, if so."""
        if self._elastic is None:
            return "its workers can't change hosts, since the job is not elastic (--min-np)"
        if self._lifecycle.phase is not Phase.RUNNING:
            return "the job is not running yet" if self._round is None else "the job is ending"
        # A question leaves no trace: a successor replays only events.
        return (self._moves or self._new_moves(self._elastic)).refusal(host, to, now)

    def move(self, event: on.MoveWanted, now: float) -> Decision:
        """Begin to move a host's workers, or report why not."""
        reason = self.move_refusal(event.host, event.to, now)
        if self._elastic is None or reason is not None:
            return alone([tell.HostStays(event.host, reason or "")])
        self._moves = self._moves or self._new_moves(self._elastic)
        return Decision(self._moves.begin(event, now))

    def host_judged(self, event: on.HostJudged, now: float) -> Decision:
        """Note that a host is slow, or not slow any more; with --evict-slow move its workers."""
        host = self._pool.get(event.host)
        if host is None or self._lifecycle.phase not in AT_WORK:
            return Decision(then=Then.NOTHING)
        host.slow = event.evidence
        if not event.reason:
            return Decision(then=Then.NOTHING)
        decision = alone([tell.HostSlow(*event)])
        least = None if self._elastic is None else self._elastic.evict_slow
        is_due = all(now >= at + _EVICTION_PAUSE for at in self._evicted.values())
        if least is None or (event.factor or 0.0) < least or event.host in self._evicted or not is_due:
            return decision
        # Once for each host: after a refusal the user has to decide.
        self._evicted[event.host] = now
        return decision.also(
            self.move(on.MoveWanted(event.host, None, f"--evict-slow: {event.evidence}"), now)
        )

    def _new_moves(self, options: ElasticOptions) -> "Moves":
        from hvlaunch.engine.moves import Moves  # noqa: PLC0415 (few jobs have moves)

        return Moves(options, self._pool, self._rounds, self._waits)

    def advance_move(self, now: float) -> list[Action]:
        """Take the next step of a move, if any."""
        return [] if self._moves is None else self._moves.advance(now)

    def finish_move(self, now: float) -> list[Action]:
        """Note the end of a move, if any."""
        return [] if self._moves is None else self._moves.finish(now)

    def pardon(self, now: float) -> list[Action]:
        """Retry lost hosts as soon as the others, which were enough before, are too few."""
        lost = [
            host
            for host in self._pool
            if host.listed and (host.was_lost or host.was_moved) and host.cooldown.is_for_good
        ]
        if not lost or self._can_do_without(lost[0], now):
            return []
        # All of them: nobody knows which one will come back.
        pardoned: list[Action] = []
        for host in lost:
            problem = self._pool.errors.get(host.name)
            cause = why.WorkersMoved() if problem is None else why.HostProblem(problem)
            pardoned += self.exclude(host, cause, now, _CONNECT_COOLDOWN)[:1]
        return pardoned

    def _others_do(self, host: PoolHost) -> bool:
        """True if the other hosts have enough slots, counting those whose cool-down will end."""
        others = [other for other in self._pool if other.listed and not other.cooldown.is_for_good]
        return self._have_enough([other for other in others if other is not host])

    def _have_enough(self, hosts: Sequence[PoolHost]) -> bool:
        """True if these hosts have enough slots for a round."""
        return self._pool.capacity(hosts) >= self._rounds.bounds.least

    def agent_ends(self, host: str, now: float) -> None:
        """Note that the host's agent ends its workers by itself."""
        self._workers.stop_by_agent(host, gently(self._spec.grace), now)

    def blame(self, problem: Problem, now: float) -> Decision:
        """Exclude a host of an incompatible pair, or end the job."""
        host = self._to_be_left_out(problem)
        if host is None or not (self._elastic or self._spec.skip_bad_hosts):
            return Decision((), Ending(error=problem))
        self._pool.errors[host.name] = problem
        if self._elastic is None:
            self._rounds.changed()
            return Decision()
        return Decision(self.exclude(host, why.HostProblem(problem), now))

    def _to_be_left_out(self, problem: Problem) -> PoolHost | None:
        """Choose the host to exclude: keep the only holder of the state, else a host that answers, else rank 0's."""
        named = [self._pool.get(name) for name in (problem.host, problem.other) if name is not None]

        # The host with the smallest value is left out.
        def value(host: PoolHost) -> tuple[bool, bool, bool]:
            is_first = host.name in self._rounds.next_hosts[:1]
            return self._alone_has_state(host), not self._rounds.probing.is_silent(host.name), is_first

        return min((host for host in named if host is not None), key=value, default=None)

    def hopeless(self) -> Ending | None:
        """Return the ending of a job that will never have enough slots again."""
        if self._elastic is None or self._elastic.discovers or self._pool.connecting:
            return None
        if self._round is not None and self._round.state is RoundState.RUNNING:
            return None
        # Hosts in a cool-down count if it will end.
        left = self._pool.capacity([host for host in self._pool if not host.cooldown.is_for_good])
        if left >= self._elastic.min_np:
            return None
        return Ending(error=self._pool.failure or NotEnoughSlots(self._elastic.min_np, left).problem)


def _role_policies(spec: JobSpec, pool: Pool, rounds: Rounds, waits: Waits) -> "RolePolicies":
    from hvlaunch.engine.roles import RolePolicies  # noqa: PLC0415 (few jobs have roles)

    return RolePolicies(spec, pool, rounds, waits)


def _ended(exit_: WorkerExit) -> why.WorkerEnded:
    return why.WorkerEnded(exit_.rank, exit_.host, exit_.code, exit_.signal, exit_.not_started, exit_.role)
