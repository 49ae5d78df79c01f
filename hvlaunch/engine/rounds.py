# ruff: noqa: ARG002 (the two ways have the same questions, and not each needs all that is asked with)
"""The current round and the next: plan, probing, beginning and end; and the two ways to form a round. Pure.

A round has new workers (FreshWorkers), or workers that have asked for their places (AskingWorkers).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, HostNetwork
from hvlaunch.engine.causes import Cause
from hvlaunch.engine.events import HostAnswers, HostQuiet, WorkerBeat
from hvlaunch.engine.hosts import LOOPBACK, Pool, PoolHost, Probing, shared_machines
from hvlaunch.engine.round import (
    Bounds,
    Hold,
    Plan,
    Restarts,
    Round,
    RoundState,
    Settled,
    Starter,
    hand_over,
    in_order,
    seated,
)
from hvlaunch.engine.waits import ROUND_WAITS, Wait, Waits
from hvlaunch.engine.workers import StacksBeforeKill, Worker, Workers, WorkerState, gently
from hvlaunch.errors import (
    BadUsage,
    HostsFailed,
    HvlaunchError,
    NotEnoughSlots,
    NotEnoughSlotsInTime,
    Problem,
)
from hvlaunch.hosts.placement import Launch, Placement, place, seats
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = ["AskingWorkers", "Forming", "FreshWorkers", "Rounds"]

GATHERING_TIME = 5.0
"""Seconds to wait for hosts or workers on their way if there are enough others."""
_FIRST_GATHERING_TIME = 30.0
"""Seconds to wait for the first round's workers, whose imports may take long."""


class Forming(ABC):
    """A way to form rounds. `current` is the newest round."""

    sees_commits: bool
    """True if its workers report their commits."""
    stops_at_failure: bool
    """True if the workers of a failed round are stopped whatever they are doing."""

    def __init__(self, spec: JobSpec, pool: Pool, workers: Workers, starter: Starter, waits: Waits) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self._workers = workers
        self._starter = starter
        self._waits = waits
        self._bounds = Bounds.of_spec(spec)

    def _gather(self, now: float, seconds: float) -> None:
        """Begin to wait for others, if that has not begun."""
        if not self._waits.has(Wait.GATHERING):
            self._waits.begin(Wait.GATHERING, None, now + seconds)

    def _near_first(self, hosts: list[PoolHost]) -> list[PoolHost]:
        """Return the hosts in the order of --rank-order."""
        if self._spec.rank_order == "given":
            return hosts
        from hvlaunch.engine.fabric import fabric_of, near_first  # noqa: PLC0415 (few jobs have another order)

        by_name = {host.name: host for host in hosts}
        texts = {host.name: host.facts.fabric for host in hosts if host.facts is not None}
        fabrics = {name: fabric_of(text) for name, text in texts.items() if text is not None}
        return [by_name[name] for name in near_first(list(by_name), fabrics)]

    # The next round

    @abstractmethod
    def is_busy(self, current: Round | None) -> bool:
        """True if its workers must leave the current round before another one is possible."""

    @abstractmethod
    def choose(self, current: Round | None, now: float) -> Plan | None:
        """Return the next round's plan; None for lack of workers. Raises HvlaunchError if no round is possible."""

    @abstractmethod
    def newest_commit(self, plan: Plan) -> int:
        """Return the newest commit of the planned workers; -1 without any."""

    @abstractmethod
    def enter(self, plan: Plan, current: Round, now: float) -> list[Action]:
        """Begin the round."""

    def fill(self, current: Round | None, number: int, now: float) -> list[Action]:
        """Start workers for rounds from `number` on, and as spares."""
        return []

    # The round that there is

    @abstractmethod
    def gain(self, current: Round, now: float) -> int:
        """Return by how many workers the next round could be larger."""

    @property
    @abstractmethod
    def has_more_coming(self) -> bool:
        """True if a larger round may wait a little for others on their way."""

    @abstractmethod
    def may_shed(self, leaving: Sequence[Worker], members: Sequence[Worker]) -> bool:
        """True if the round may end to let these workers leave."""

    @abstractmethod
    def change(self, current: Round, cause: Cause, now: float) -> list[Action]:
        """Make the workers leave the round without loss of work."""

    @abstractmethod
    def break_off(self, current: Round, cause: Cause, now: float) -> list[Action]:
        """Make the workers leave the round at once."""

    @abstractmethod
    def has_trained(self, worker: Worker, *, is_member: bool) -> bool:
        """True if the training is done when this worker ends well."""

    # What need not be looked at

    def awaits_asks(self, current: Round | None) -> bool:
        """True if no round is possible before more workers ask, or some time passes."""
        return False

    def awaits_ends(self, current: Round | None) -> bool:
        """True if no round is possible before more workers end."""
        return False


class FreshWorkers(Forming):
    """Starts all workers anew for each round, with their places in the environment.

    A static job forms its only round in this way, and needs all of its hosts.
    """

    sees_commits = False
    stops_at_failure = True

    def __init__(
        self,
        spec: JobSpec,
        pool: Pool,
        workers: Workers,
        starter: Starter,
        waits: Waits,
        stacks: StacksBeforeKill,
    ) -> None:
        super().__init__(spec, pool, workers, starter, waits)
        self._stacks = stacks

    def is_busy(self, current: Round | None) -> bool:
        return current is not None and self._workers.size > 0

    def choose(self, current: Round | None, now: float) -> Plan | None:
        return self._choose_all(now) if self._elastic is None else self._choose_slots(current, now)

    def _choose_all(self, now: float) -> Plan | None:
        """Plan the round of a static job: all of its hosts must be ready, or as many as it needs."""
        hosts = self._enough(now) if self._spec.skip_bad_hosts else self._all(now)
        if hosts is None:
            return None
        if self._spec.roles:
            from hvlaunch.hosts.roles import place_roles  # noqa: PLC0415 (few jobs have roles)

            return Plan.with_launches(hosts, place_roles(self._spec.roles))
        places = self._places(hosts)
        if self._spec.rank_order != "given":
            # The first hosts are used, whatever their order.
            used = {at.host for at in places}
            hosts = self._near_first([host for host in hosts if host.name in used])
            places = self._places(hosts)
        last = self._spec.end_with_rank
        if last is not None and last >= len(places):
            raise self._too_few(
                BadUsage(f"--end-with-rank {last}: the job has only ranks 0-{len(places) - 1}")
            )
        return Plan.with_launches(
            hosts, [self._workers.next_launch((at.host, at.local_rank), at) for at in places]
        )

    def _places(self, hosts: Sequence[PoolHost]) -> list[Placement]:
        slots = [(host.name, self._pool.slots(host)) for host in hosts]
        return place(slots, self._spec.np, self._spec.map_by)

    def _all(self, now: float) -> list[PoolHost] | None:
        """Return the hosts; None until each is ready."""
        # One bad host ends a static job, so a partial plan is of no use.
        if self._pool.connecting or self._pool.errors:
            return None
        return [host for host in self._pool if host.is_usable(now)]

    def _enough(self, now: float) -> list[PoolHost] | None:
        """Return the first working hosts with enough slots; None until they are ready.

        With --map-by node, these are as many hosts as workers: each gets one first. Raises HvlaunchError for lack of slots.
        """
        hosts: list[PoolHost] = []
        slots, least = 0, self._spec.np or 1
        for host in self._pool:
            has_enough = (len(hosts) if self._spec.map_by == "node" else slots) >= least
            # Hosts beyond the needed ones are not awaited.
            if host.name not in self._pool.errors and (self._spec.np is None or not has_enough):
                hosts.append(host)
                slots += self._pool.slots(host)
        if not all(host.is_usable(now) for host in hosts):
            return None
        if slots < least:
            raise self._too_few(NotEnoughSlots(least, slots))
        return hosts

    def _too_few(self, error: BadUsage) -> HvlaunchError:
        """Add to the error why hosts were skipped: with them the slots might suffice."""
        failures = self._pool.failures
        return HostsFailed([*failures, error.problem]) if failures else error

    def _choose_slots(self, current: Round | None, now: float) -> Plan | None:
        """Plan a round with the usable slots."""
        hosts = in_order((host for host in self._pool if host.is_usable(now)), current)
        total = min(self._pool.capacity(hosts), self._bounds.most)
        if total < self._bounds.least or not self._has_gathered(current, total, now):
            return None
        taken: dict[str, int] = {}
        for host in hosts:
            taken[host.name] = int(min(self._pool.slots(host), total))
            total -= taken[host.name]
        # The oldest members stay in the round: their order is that of their ranks afterwards.
        hosts = self._near_first([host for host in hosts if taken[host.name]])
        counts = [(host.name, range(taken[host.name])) for host in hosts]
        return Plan.with_launches(
            hosts, [self._workers.next_launch(seat, at) for seat, at in seats(counts).items()]
        )

    def _has_gathered(self, current: Round | None, total: float, now: float) -> bool:
        """True if the round may begin with this many workers; False to wait for connecting hosts."""
        # Later rounds begin at once: their workers have waited long enough.
        if not self._pool.connecting or total >= self._bounds.most or current is not None:
            return True
        if total >= (self._spec.np or self._bounds.least):
            self._gather(now, GATHERING_TIME)
        return self._waits.is_over(Wait.GATHERING, now)

    def newest_commit(self, plan: Plan) -> int:
        return -1

    def enter(self, plan: Plan, current: Round, now: float) -> list[Action]:
        facts: list[Action] = []
        if self._elastic is None:
            facts += [tell.HostSkipped(problem) for problem in self._pool.failures]
        if self._spec.np is None and not current.number and (assumed := self._assumed(plan)):
            facts.append(assumed)
        return facts + self._starter.start(plan, current, now)

    def _assumed(self, plan: Plan) -> tell.SlotsAssumed | None:
        """Return the hosts whose number of slots is a guess."""
        hosts = [host for host in plan.hosts if host.host.slots is None and not host.gpus]
        if self._spec.slots_per_host is not None or not hosts:
            return None
        cpus = min(1 if host.facts is None else host.facts.cpus for host in hosts)
        return tell.SlotsAssumed(tuple(host.name for host in hosts), cpus)

    def gain(self, current: Round, now: float) -> int:
        able = self._pool.capacity([host for host in self._pool if host.is_usable(now)])
        return max(0, able - current.size)

    @property
    def has_more_coming(self) -> bool:
        return bool(self._pool.connecting)

    def may_shed(self, leaving: Sequence[Worker], members: Sequence[Worker]) -> bool:
        return True

    def change(self, current: Round, cause: Cause, now: float) -> list[Action]:
        stops = self._workers.stop(self._workers.living, gently(self._spec.grace), now)
        return [tell.RoundEnding(current.number, cause), *stops] if stops else []

    def break_off(self, current: Round, cause: Cause, now: float) -> list[Action]:
        stops = self._stacks.stop(self._workers.living, gently(self._spec.grace), now)
        return [tell.RoundEnding(current.number, cause), *stops] if stops else []

    def has_trained(self, worker: Worker, *, is_member: bool) -> bool:
        return is_member

    def awaits_ends(self, current: Round | None) -> bool:
        is_running = current is not None and current.state is RoundState.RUNNING
        return self._workers.size > 0 and not is_running


class AskingWorkers(Forming):
    """Places workers on request at the rendezvous; they move from round to round."""

    sees_commits = True
    stops_at_failure = False

    def __init__(
        self,
        spec: JobSpec,
        elastic: ElasticOptions,
        pool: Pool,
        workers: Workers,
        starter: Starter,
        waits: Waits,
    ) -> None:
        super().__init__(spec, pool, workers, starter, waits)
        self._options = elastic

    def is_busy(self, current: Round | None) -> bool:
        """True if the round is changing, and no worker has reached its next commit."""
        return (
            current is not None and current.state is RoundState.CHANGING and not self._waits.has(Wait.LEAVING)
        )

    def choose(self, current: Round | None, now: float) -> Plan | None:
        """Plan a round of the workers that have asked, once all survivors of the last round have."""
        if self._workers.count(WorkerState.WORKING):
            return None
        waiting = [worker for worker in self._workers.waiting if self._pool[worker.host].silent_for is None]
        able = [worker for worker in waiting if self._pool.has_slot(worker.seat, now)]
        hosts = in_order(self._pool, current)
        index = {host.name: number for number, host in enumerate(hosts)}
        # Survivors first: at --max-np new workers wait rather than they.
        target = self._pool.target
        able.sort(key=lambda at: (not at.has_state, at.host != target, index[at.host], at.slot))
        # Without a survivor among them the training would begin from its start.
        if not any(worker.has_state for worker in able):
            able = hand_over(able, [worker for worker in waiting if worker.has_state])
        if len(able) < self._bounds.least or not self._is_first_complete(able, now):
            return None
        if self._is_newest_away(able, current):
            return None  # until its worker returns, or the host is lost
        chosen = able if self._bounds.most > len(able) else able[: int(self._bounds.most)]
        return Plan.with_launches(*seated(hosts, chosen, self._near_first))

    def _is_newest_away(self, able: Sequence[Worker], current: Round | None) -> bool:
        """True if only workers of suspected hosts have the state.

        These hosts may answer again, and their workers have not asked for a place yet.
        """
        least = -1 if current is None else current.least_commit
        if least < 0 or any(worker.commit >= least for worker in able):
            return False
        return any(
            worker.commit >= least
            and (worker.state is WorkerState.ASIDE or self._pool[worker.host].silent_for is not None)
            for worker in self._workers.living
        )

    def _is_first_complete(self, waiting: Collection[Worker], now: float) -> bool:
        """True if a round of new workers alone may begin while others still start."""
        if any(worker.has_state for worker in waiting) or len(waiting) >= self._bounds.most:
            return True
        self._gather(now, _FIRST_GATHERING_TIME)
        return not self.has_more_coming or self._waits.is_over(Wait.GATHERING, now)

    def newest_commit(self, plan: Plan) -> int:
        return self._newest(plan).commit

    def _newest(self, plan: Plan) -> Worker:
        workers = self._workers.in_seats(launch.seat for launch in plan.launches)
        return max(workers, key=lambda worker: worker.commit)

    def enter(self, plan: Plan, current: Round, now: float) -> list[Action]:
        # They have asked, so they run.
        current.note_all_started()
        self._waits.begin(Wait.MEETING, None, now + self._options.reset_timeout)
        return self._starter.assign_places(plan, current, self._newest(plan), now)

    def fill(self, current: Round | None, number: int, now: float) -> list[Action]:
        hosts = in_order((host for host in self._pool if host.may_join(now)), current)
        free = self._free_slots(hosts, now)
        if not free:
            return []
        planned = seats(
            (
                host.name,
                sorted([*(worker.slot for worker in self._workers.on(host.name)), *free.get(host.name, ())]),
            )
            for host in hosts
        )
        starts: list[Action] = []
        for name, slots in free.items():
            host = self._pool[name]
            network = HostNetwork(
                master_addr=LOOPBACK, master_port=0, interface=None, rendezvous=host.rendezvous
            )
            launches = [self._workers.next_launch((name, slot), planned[name, slot]) for slot in slots]
            starts += self._starter.launch(host, launches, network, number, WorkerState.STARTING, now)
        return starts

    def _free_slots(self, hosts: Sequence[PoolHost], now: float) -> Mapping[str, Sequence[int]]:
        """Return free slots by host, as far as more workers are useful."""
        moving, target = self._pool.moving, self._pool.target
        # The workers of a moving host get substitutes while they still work, and workers of a suspected host may be lost.
        staying = [
            worker
            for worker in self._workers.living
            if worker.host != moving and self._pool[worker.host].silent_for is None
        ]
        room = self._bounds.most + self._options.spares - len(staying)
        free: dict[str, list[int]] = {}
        for host in sorted(hosts, key=lambda host: host.name != target):
            if not host.has_tried_rendezvous or host.name == moving:
                continue
            for slot in range(self._pool.slots(host)):
                cooldown = self._workers.cooldowns.get((host.name, slot))
                # A slot in its cool-down does not count as room.
                if room < 1 or self._workers.at((host.name, slot)) or (cooldown and cooldown.holds(now)):
                    continue
                free.setdefault(host.name, []).append(slot)
                room -= 1
        return free

    def gain(self, current: Round, now: float) -> int:
        return sum(self._pool.may_join(worker.seat, now) for worker in self._workers.waiting)

    @property
    def has_more_coming(self) -> bool:
        return self._workers.count(WorkerState.STARTING) > 0

    def may_shed(self, leaving: Sequence[Worker], members: Sequence[Worker]) -> bool:
        """True if workers with the state remain for the others."""
        return len(leaving) < len(members)

    def change(self, current: Round, cause: Cause, now: float) -> list[Action]:
        return [do.Change(current.number, cause)]

    def break_off(self, current: Round, cause: Cause, now: float) -> list[Action]:
        self._waits.begin(Wait.LEAVING, None, now + self._options.reset_timeout)
        return [do.Break(current.number, cause)]

    def has_trained(self, worker: Worker, *, is_member: bool) -> bool:
        return worker.has_state

    def awaits_asks(self, current: Round | None) -> bool:
        if current is not None:
            return self._workers.count(WorkerState.WORKING) > 0 and current.state is not RoundState.RUNNING
        others = self._workers.size - self._workers.count(WorkerState.STARTING)
        return self._waits.has(Wait.GATHERING) and self.has_more_coming and others < self._bounds.most


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

    def change(self, cause: Cause, now: float) -> list[Action]:
        """End the running round without loss of work."""
        self._waits.end(Wait.GATHERING)
        if self.round is None:
            return []
        self._hold.change(self.round, now)
        self.round.change(cause, now)
        return self.forming.change(self.round, cause, now)

    def break_off(self, cause: Cause, now: float) -> list[Action]:
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
