"""The current round and the next: plan, probing, beginning and end. Pure."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from hvlaunch.engine import causes as why
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.events import HostAnswers, HostQuiet, WorkerBeat
from hvlaunch.engine.forming import (
    GATHERING_TIME,
    AskingWorkers,
    Bounds,
    Forming,
    FreshWorkers,
    Plan,
    Starter,
)
from hvlaunch.engine.network import Probing, shared_machines
from hvlaunch.engine.pool import Pool
from hvlaunch.engine.round import Hold, Restarts, Round, RoundState
from hvlaunch.engine.waits import ROUND_WAITS, Wait, Waits
from hvlaunch.engine.workers import StacksBeforeKill, Worker, Workers, WorkerState
from hvlaunch.errors import HvlaunchError, NotEnoughSlotsInTime, Problem
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import JobSpec

__all__ = ["Rounds", "Settled"]


class Settled(NamedTuple):
    """Actions for the next round; `problem` is the reason for a certain failure."""

    actions: list[Action]
    problem: Problem | None = None


class Rounds:
    """The workers, their round and the next round.

    Call settle() after each change of the workers and hosts that a round may have.
    """

    def __init__(self, spec: JobSpec, pool: Pool, waits: Waits) -> None:
        self._waits = waits
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self.bounds = Bounds.of_spec(spec)
        self.workers = Workers(waits)
        self.stacks = StacksBeforeKill(self.workers)
        self.probing = Probing(spec.network_interfaces, spec.lease, waits, needs_all=spec.nccl == "auto")
        self._starter = Starter(spec, self.workers, self.probing)
        self._hold = Hold()
        self.forming: Forming = FreshWorkers(spec, pool, self.workers, self._starter, waits, self.stacks)
        self.round: Round | None = None
        self.restarts = Restarts(spec.elastic)
        self.reports_steps = False
        """True once a worker has reported a step."""
        self._number = 0
        self._plan: Plan | None = None
        self._is_short_told = False
        self.restarting: set[int] = set()
        """Ranks of a role that start again, when their time has come."""

    @property
    def has_begun(self) -> bool:
        """True once the workers of the first round were started."""
        return self.round is not None

    @property
    def awaits_asks(self) -> bool:
        """True if no round is possible before more workers ask, or some time passes."""
        return self.forming.awaits_asks(self.round)

    @property
    def awaits_ends(self) -> bool:
        """True if no round is possible before more workers end."""
        return self.forming.awaits_ends(self.round)

    # What the engine tells

    def changed(self) -> None:
        """Discard the plan for the next round: hosts or workers came or went."""
        self._plan = None

    def lost(self, host: str) -> None:
        """Forget a host that is lost or leaving."""
        self.changed()
        self.probing.forget(host)

    def hears(self, event: HostQuiet | HostAnswers) -> None:
        """Note that a host does not answer, or answers again."""
        self.probing.hears(event)
        self._waits.end(Wait.LEAVING_UNHEARD)

    @property
    def next_hosts(self) -> list[str]:
        """Names of the planned round's hosts, in order of rank."""
        return [host.name for host in self._plan.hosts] if self._plan is not None else []

    def reached(self, host: str) -> None:
        """Note the host's report about the rendezvous."""
        if self._plan is not None:
            self._plan.unreached.discard(host)

    def asked(self, worker: Worker, last_round: int, commit: int, now: float) -> bool:
        """Note a worker's request for a place in a round after `last_round`; False if the worker has a place already."""
        if isinstance(self.forming, FreshWorkers):
            self._take_back(now)
        if worker.is_beyond(last_round):
            return False
        self.workers.ask(worker, last_round, commit, now)
        self.changed()
        return True

    def _take_back(self, now: float) -> None:
        """Replace the first round by one that is still to come, since its workers turn out to ask for their places."""
        elastic = self._elastic
        assert elastic is not None  # noqa: S101 (only workers of elastic jobs are listened to)
        self.forming = AskingWorkers(
            self._spec, elastic, self._pool, self.workers, self._starter, self._waits
        )
        self.workers.take_back(now)
        if self.round is not None:
            # Its workers ask, so it runs: all workers of an ended round were told to end.
            self._number = self.round.number
            self.round.leave(now)
        self.round = None
        self._waits.end_all(ROUND_WAITS)

    def started(self, worker: Worker) -> None:
        """Note that the worker's process runs."""
        if self.round is not None and self.is_member(worker):
            self.round.note_started(worker.rank)

    def is_alone(self, worker: Worker, library: str) -> None:
        """Note a worker with this library and without any meeting."""
        if self.round is not None and self.is_member(worker):
            self.round.note_alone(worker.rank, library)

    def beat(self, worker: Worker, event: WorkerBeat) -> bool:
        """Note a worker's reports on its round and training; True if they are news."""
        is_news = worker.is_done is not event.is_done
        worker.is_done = event.is_done
        if self.round is not None and event.round == self.round.number and self.is_member(worker):
            is_news = is_news or worker.rank not in self.round.met
            if self.round.has_met(worker.rank):
                self._waits.end(Wait.MEETING)
        return is_news

    def is_member(self, worker: Worker) -> bool:
        """True if the worker is in the current round, or was when it was stopped."""
        return self.round is not None and worker.round == self.round.number

    def note_step(self, number: int) -> None:
        """Note that workers of this round report new steps."""
        self.reports_steps = True
        if self.round is not None and self.round.number == number:
            self.round.has_stepped = True

    # The next round

    def settle(self, now: float) -> Settled:
        """Return the actions for the next round, or for the current one."""
        if self.is_running:
            return Settled([] if self._elastic is None else self._grow(now))
        # Its workers have not left yet.
        if self.has_begun and self.forming.is_busy(self.round):
            return Settled([])
        settled = self._form(now)
        if self.is_running and self._elastic is not None:
            settled.actions.extend(self._grow(now))
        return settled

    @property
    def is_running(self) -> bool:
        """True if a round is running."""
        return self.round is not None and self.round.state is RoundState.RUNNING

    def _form(self, now: float) -> Settled:
        actions: list[Action] = []
        if self._plan is None:
            # Before the plan, since a plan asks for probes.
            self._ask_again()
            try:
                self._plan = self.forming.choose(self.round, now)
            except HvlaunchError as error:
                return Settled(actions, error.problem)
            if self._plan is None:
                self.probing.finish()
                return self._wait_for_more(now)
            if self.round is None and not self.workers.size:
                actions += [tell.SharedMachine(names) for names in shared_machines(self._plan.facts)]
            actions += self.probing.want(self._plan.facts, now)
        plan = self._plan
        if not self.probing.is_settled(now, others=not plan.unreached):
            return Settled(actions)
        network = self.probing.network
        problem = network.problem() if network is not None else None
        if problem is not None:
            return self._doubt(problem, plan, actions, now)
        self.probing.finish()
        self._plan = None
        self._waits.end(Wait.SLOTS)
        self._waits.end(Wait.GATHERING)
        return Settled(actions + self._enter(plan, now))

    def _doubt(self, problem: Problem, plan: Plan, actions: list[Action], now: float) -> Settled:
        """Handle hosts of the plan that apparently can't work together."""
        host, other = problem.host, problem.other
        if host is not None and other is not None:
            # A static job has no other round in which the path could be back.
            if self._elastic is not None and not self.probing.is_certain(host, other, now):
                return Settled([*actions, *self.probing.want(plan.facts, now)])
            self.probing.ask_again(host, other)
        self.probing.finish()
        return Settled(actions, problem)

    def _ask_again(self) -> None:
        """Probe the hosts of the last round again if nothing explains its failure."""
        last = self.round
        if last is not None and last.take_doubt():
            self.probing.doubt()

    @property
    def _is_beginning(self) -> bool:
        """True while the job's first hosts connect; they have a time limit of their own."""
        return self.round is None and self._pool.has_newcomers

    def _wait_for_more(self, now: float) -> Settled:
        """Wait for slots: there are too few for a round."""
        if self._elastic is None:
            return Settled([])
        slots = self._pool.capacity([host for host in self._pool if host.is_usable(now)])
        seconds, least = self._elastic.elastic_timeout, self.bounds.least
        if not self._waits.has(Wait.SLOTS):
            self._waits.begin(Wait.SLOTS, None, now, seconds)
            self._is_short_told = False
        # Too few slots at the very beginning are normal while hosts connect.
        is_coming = self.round is None and self._pool.has_more(now)
        if not self._is_short_told and slots < least and not is_coming:
            self._is_short_told = True
            return Settled([tell.SlotsLacking(least, slots, seconds)])
        if self._waits.is_over(Wait.SLOTS, now) and not self._is_beginning:
            errors = "".join(f"\n{error}" for error in self._pool.failures)
            return Settled([], NotEnoughSlotsInTime(least, slots, seconds, errors).problem)
        return Settled([])

    # Its beginning

    def _begin(self, launches: Sequence[Launch], now: float, commit: int = -1) -> Round:
        before = self.round
        self.round = Round(self._number, launches, now, commit=commit)
        self._waits.end_all(ROUND_WAITS)
        if self._elastic is not None:
            # Begun for each elastic round: idle summaries carry its start.
            self._waits.begin(Wait.COMMIT, None, now, self._elastic.commit_timeout or inf)
            self._waits.begin(Wait.HOLD, None, now + self._hold.seconds)
        if before is not None:
            has_failed = before.state is RoundState.BROKEN
            before.leave(now)
            self.round.inherit(before)
            # A worker that asked may report the commit before its beat did.
            before.committed(commit)  # who has asked may have told of it before its beat did
            # A failure was judged when it came, by all but a commit that nobody had reported yet.
            if before.has_progressed if has_failed else before.is_fruitful(now):
                self.restarts.gained()
        self._number += 1
        return self.round

    def _enter(self, plan: Plan, now: float) -> list[Action]:
        """Begin the planned round."""
        current = self._begin(plan.launches, now, self.forming.newest_commit(plan))
        return self.forming.enter(plan, current, now)

    # Its end

    def fill(self, now: float) -> list[Action]:
        """Start workers that will ask in free slots, for later rounds and as spares."""
        return self.forming.fill(self.round, self._number, now)

    def restart(self, ranks: range, now: float) -> list[Action]:
        """Start the next workers of these ranks in their slots."""
        self.restarting.difference_update(ranks)
        if self.round is None:
            return []
        self.round.forget(ranks)
        return self._starter.start_again(ranks, self.round.number, now)

    def _grow(self, now: float) -> list[Action]:
        """End the running round for a larger round, or to let workers leave."""
        current = self.round
        if current is None or self._hold.keeps(current, now, is_costly=self.forming.stops_at_failure):
            return []
        members = self.workers.working
        leaving = [worker for worker in members if not self._pool.has_slot(worker.seat, now)]
        if leaving and self.forming.may_shed(leaving, members):
            hosts = dict.fromkeys(worker.host for worker in leaving)
            return self.change(why.WorkersToLeave(tuple(hosts)), now)
        # Workers that leave make room for as many others.
        room = self.bounds.most - current.size + len(leaving)
        more = self.forming.gain(current, now) if room > 0 else 0
        # Substitutes for workers that are about to move join with the move.
        more = max(0, more - sum(worker.host == self._pool.moving for worker in members))
        if not more:
            self._waits.end(Wait.GATHERING)
            return []
        if not self._waits.has(Wait.GATHERING):
            self._waits.begin(Wait.GATHERING, None, now + GATHERING_TIME)
        # A change costs all workers time, so workers on their way are gathered first. A round whose members all have to
        # leave can't wait: after --drain-timeout the state of the training is lost.
        is_urgent = len(leaving) == len(members) and more >= self.bounds.least
        has_gathered = not self.forming.has_more_coming or self._waits.is_over(Wait.GATHERING, now)
        if not has_gathered and more < room and not is_urgent:
            return []
        return self.change(why.MoreWorkers(more), now)

    def change(self, cause: why.Cause, now: float) -> list[Action]:
        """End the running round without loss of work."""
        self._waits.end(Wait.GATHERING)
        if self.round is None:
            return []
        self._hold.change(self.round, now)
        self.round.change(cause, now)
        return self.forming.change(self.round, cause, now)

    def break_off(self, cause: why.Cause, now: float) -> list[Action]:
        """End the round at once, if another may follow."""
        current = self.round
        if current is None or self._elastic is None or current.state is RoundState.BROKEN:
            return []
        current.break_off(cause, now)
        self._waits.end(Wait.SETTLING)
        # A first round after the loss of all state gathers for longer than a growing one.
        self._waits.end(Wait.GATHERING)
        self.changed()
        return self.forming.break_off(current, cause, now)

    # Waits

    def open_waits(self) -> Iterator[Wait]:
        """Return the waits of this round and the next that count in this situation."""
        if self.forming.sees_commits:
            yield Wait.SLOT_COOLDOWN
        if self._plan is not None:
            yield from (Wait.PROBING, Wait.PROBING_AGAIN, Wait.PROBE_RETRY)
        elif not self._is_beginning:
            yield Wait.SLOTS
        if self.round is None:
            return
        yield Wait.SETTLING
        yield Wait.RESTART
        if self.is_running and self.forming.stops_at_failure:
            yield Wait.HOLD
        if self.round.state is not RoundState.BROKEN:
            yield Wait.MEETING
        if self.workers.count(WorkerState.WORKING):
            leave, unheard = self._waits.until(Wait.LEAVING), self._waits.until(Wait.LEAVING_UNHEARD)
            # The later of the two counts.
            is_longer = leave is not None and unheard is not None and unheard > leave
            yield Wait.LEAVING_UNHEARD if is_longer else Wait.LEAVING
