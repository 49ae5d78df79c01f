"""The round that there is, and the next one: when it is planned, when its hosts have found each other, when it begins. Pure."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from hvlaunch.engine import causes as why
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.events import HostAnswers, HostQuiet, WorkerBeat
from hvlaunch.engine.forming import GATHERING_TIME, AskingWorkers, Bounds, Forming, FreshWorkers
from hvlaunch.engine.life import State
from hvlaunch.engine.network import Probing, shared_machines
from hvlaunch.engine.pool import Pool
from hvlaunch.engine.round import Hold, Restarts, Round, RoundState
from hvlaunch.engine.starting import Plan, Starter
from hvlaunch.engine.waits import ROUND_WAITS, Wait, Waits
from hvlaunch.engine.workers import StacksBeforeKill, Worker, Workers
from hvlaunch.errors import HvlaunchError, NotEnoughSlotsInTime, Problem
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import JobSpec

__all__ = ["Rounds", "Settled"]


class Settled(NamedTuple):
    """What is to be done for the next round; `problem` is why there can be none, if that is certain."""

    actions: list[Action]
    problem: Problem | None = None


class Rounds:
    """The workers, the round that they are in, and the next one.

    settle() is to be called after whatever may change who can be in a round.
    """

    def __init__(self, spec: JobSpec, pool: Pool, waits: Waits) -> None:
        self._waits = waits
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self.bounds = Bounds.of(spec)
        self.workers = Workers(waits)
        self.stacks = StacksBeforeKill(self.workers)
        self.probing = Probing(spec.network_interfaces, spec.lease, waits)
        self._starter = Starter(self.workers, self.probing)
        self._hold = Hold()
        self.forming: Forming = FreshWorkers(spec, pool, self.workers, self._starter, waits, self.stacks)
        self.round: Round | None = None
        self.restarts = Restarts(spec.elastic)
        self._number = 0
        self._plan: Plan | None = None
        self._is_short_told = False

    @property
    def has_begun(self) -> bool:
        """Whether the workers of the first round were started."""
        return self.round is not None

    @property
    def awaits_asks(self) -> bool:
        """Whether there can be no round before other workers have asked too, or some time has passed."""
        return self.forming.awaits_asks(self.round)

    @property
    def awaits_ends(self) -> bool:
        """Whether there can be no round before other workers have ended."""
        return self.forming.awaits_ends(self.round)

    # What the engine tells

    def changed(self) -> None:
        """Hosts or workers came or went: the plan for the next round is to be made anew."""
        self._plan = None

    def lost(self, host: str) -> None:
        """The host is gone, or going."""
        self.changed()
        self.probing.forget(host)

    def hears(self, event: HostQuiet | HostAnswers) -> None:
        """A host does not answer, or does again."""
        self.probing.hears(event)
        self._waits.end(Wait.LEAVING_UNHEARD)

    @property
    def next_hosts(self) -> list[str]:
        """The hosts of the planned round, in order of rank."""
        return [host.name for host in self._plan.hosts] if self._plan is not None else []

    def reached(self, host: str) -> None:
        """The host has said where it reaches the rendezvous."""
        if self._plan is not None:
            self._plan.unreached.discard(host)

    def asked(self, worker: Worker, last_round: int, commit: int, now: float) -> bool:
        """The worker wants a place in a round newer than that; False where it has one already."""
        if isinstance(self.forming, FreshWorkers):
            self._take_back(now)
        if worker.round is not None and last_round != worker.round:
            return False
        self.workers.ask(worker, last_round, commit, now)
        self.changed()
        return True

    def _take_back(self, now: float) -> None:
        """The first worker asks: so the round that they were started for is one to come, and none that there is."""
        elastic = self._elastic
        assert elastic is not None  # noqa: S101 (only workers of elastic jobs are listened to)
        self.forming = AskingWorkers(
            self._spec, elastic, self._pool, self.workers, self._starter, self._waits
        )
        self.workers.take_back(now)
        if self.round is not None:
            broken = self.round.state is not RoundState.RUNNING
            self._number = self.round.number + broken
            self.round.leave(now)
        self.round = None
        self._waits.end_all(ROUND_WAITS)

    def started(self, worker: Worker) -> None:
        """The worker's process is there."""
        if self.round is not None and self.is_member(worker):
            self.round.note_started(worker.rank)

    def is_alone(self, worker: Worker, library: str) -> None:
        """The worker never met others, though it has this library."""
        if self.round is not None and self.is_member(worker):
            self.round.note_alone(worker.rank, library)

    def beat(self, worker: Worker, event: WorkerBeat) -> bool:
        """What the worker says of its round, and of its training; whether that is news."""
        is_news = worker.is_done is not event.is_done
        worker.is_done = event.is_done
        if self.round is not None and event.round == self.round.number and self.is_member(worker):
            is_news = is_news or worker.rank not in self.round.met
            if self.round.has_met(worker.rank):
                self._waits.end(Wait.MEETING)
        return is_news

    def is_member(self, worker: Worker) -> bool:
        """Whether the worker is in the round that there is, or was when it was told to end."""
        return self.round is not None and worker.round == self.round.number

    # The next round

    def settle(self, now: float) -> Settled:
        """What is to be done for the next round, or for the one that there is."""
        if self.is_running:
            return Settled([] if self._elastic is None else self._grow(now))
        if self.has_begun and self.forming.is_busy(self.round):
            return Settled([])
        settled = self._form(now)
        if self.is_running and self._elastic is not None:
            settled.actions.extend(self._grow(now))
        return settled

    @property
    def is_running(self) -> bool:
        """Whether there is a round, which goes on."""
        return self.round is not None and self.round.state is RoundState.RUNNING

    def _form(self, now: float) -> Settled:
        actions: list[Action] = []
        if self._plan is None:
            self._ask_again()
            try:
                self._plan = self.forming.choose(self.round, now)
            except HvlaunchError as error:
                return Settled(actions, error.problem)
            if self._plan is None:
                self.probing.end()
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
        self.probing.end()
        self._plan = None
        self._waits.end(Wait.SLOTS)
        self._waits.end(Wait.GATHERING)
        return Settled(actions + self._enter(plan, now))

    def _doubt(self, problem: Problem, plan: Plan, actions: list[Action], now: float) -> Settled:
        """Hosts of the plan can't work together, as it seems."""
        host, other = problem.host, problem.other
        if host is not None and other is not None:
            if self._elastic is not None and not self.probing.is_certain(host, other, now):
                return Settled([*actions, *self.probing.want(plan.facts, now)])
            self.probing.ask_again(host, other)
        self.probing.end()
        return Settled(actions, problem)

    def _ask_again(self) -> None:
        """Where the last round failed and nobody is the cause, the ways between its hosts are looked at once more."""
        last = self.round
        if last is not None and last.take_doubt():
            self.probing.doubt()

    @property
    def _is_beginning(self) -> bool:
        """Whether hosts that the job begins with have yet to get ready, for which they have a time of their own."""
        return self.round is None and self._pool.has_newcomers

    def _wait_for_more(self, now: float) -> Settled:
        """There are too few for a round."""
        if self._elastic is None:
            return Settled([])
        slots = self._pool.capacity([host for host in self._pool if host.is_usable(now)])
        seconds, least = self._elastic.elastic_timeout, self.bounds.least
        if not self._waits.has(Wait.SLOTS):
            self._waits.begin(Wait.SLOTS, None, now, seconds)
            self._is_short_told = False
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
            self._waits.begin(Wait.COMMIT, None, now, self._elastic.commit_timeout or inf)
            self._waits.begin(Wait.HOLD, None, now + self._hold.seconds)
        if before is not None:
            before.leave(now)
            self.round.inherit(before)
            before.committed(commit)  # who has asked may have told of it before its beat did
            if before.is_fruitful(now):
                self.restarts.gained()
        self._number += 1
        return self.round

    def _enter(self, plan: Plan, now: float) -> list[Action]:
        """The planned round begins."""
        current = self._begin(plan.launches, now, self.forming.newest_commit(plan))
        return self.forming.enter(plan, current, now)

    # Its end

    def fill(self, now: float) -> list[Action]:
        """Start workers that will ask, in free slots: for rounds to come, and as spares."""
        return self.forming.fill(self.round, self._number, now)

    def _grow(self, now: float) -> list[Action]:
        """Let the running round end where a larger one, or one without those that are to leave, can follow."""
        current = self.round
        if current is None or self._hold.keeps(current, now, is_costly=self.forming.stops_at_failure):
            return []
        members = self.workers.working
        leaving = [worker for worker in members if not self._pool.has_slot(worker.seat, now)]
        if leaving and self.forming.may_shed(leaving, members):
            hosts = dict.fromkeys(worker.host for worker in leaving)
            return self.change(why.WorkersToLeave(tuple(hosts)), now)
        room = self.bounds.most - current.size + len(leaving)
        more = self.forming.gain(current, now) if room > 0 else 0
        if not more:
            self._waits.end(Wait.GATHERING)
            return []
        if not self._waits.has(Wait.GATHERING):
            self._waits.begin(Wait.GATHERING, None, now + GATHERING_TIME)
        if self.forming.has_more_coming and not self._waits.is_over(Wait.GATHERING, now) and more < room:
            return []
        return self.change(why.MoreWorkers(more), now)

    def change(self, cause: why.Cause, now: float) -> list[Action]:
        """Let the running round end where its workers lose nothing."""
        self._waits.end(Wait.GATHERING)
        if self.round is None:
            return []
        self._hold.change(self.round, now)
        self.round.change(cause, now)
        return self.forming.change(self.round, cause, now)

    def break_off(self, cause: why.Cause, now: float) -> list[Action]:
        """Let the round end at once, if another may follow."""
        current = self.round
        if current is None or self._elastic is None or current.state is RoundState.BROKEN:
            return []
        current.break_off(cause, now)
        self._waits.end(Wait.SETTLING)
        self.changed()
        return self.forming.break_off(current, cause, now)

    # Waits

    def open_waits(self) -> Iterator[Wait]:
        """The waits for a next round, and of the one that there is, that count as things stand."""
        if self.forming.sees_commits:
            yield Wait.SLOT_COOLDOWN
        if self._plan is not None:
            yield from (Wait.PROBING, Wait.PROBING_AGAIN, Wait.PROBE_RETRY)
        elif not self._is_beginning:
            yield Wait.SLOTS
        if self.round is None:
            return
        yield Wait.SETTLING
        if self.is_running and self.forming.stops_at_failure:
            yield Wait.HOLD
        if self.round.state is not RoundState.BROKEN:
            yield Wait.MEETING
        if self.workers.count(State.WORKING):
            leave, unheard = self._waits.until(Wait.LEAVING), self._waits.until(Wait.LEAVING_UNHEARD)
            is_longer = leave is not None and unheard is not None and unheard > leave
            yield Wait.LEAVING_UNHEARD if is_longer else Wait.LEAVING
