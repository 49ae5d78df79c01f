"""Who is in a round and in the next one: workers that ask, or those of slots where all are started at once. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from hvlaunch.errors import HvlaunchError, NotEnoughSlotsInTime
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import causes as why
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.actions import Action, HostNetwork
from hvlaunch.gloo.engine.network import LOOPBACK, Wiring, shared_machines
from hvlaunch.gloo.engine.pool import Pool, PoolHost
from hvlaunch.gloo.engine.round import Round, RoundState
from hvlaunch.gloo.engine.seating import Plan, hand_over, seated
from hvlaunch.gloo.engine.starting import Beginning, EarlyStart
from hvlaunch.gloo.engine.workers import Worker, Workers
from hvlaunch.hosts.placement import Placement, Seat, place, seats
from hvlaunch.job import JobSpec

__all__ = ["Rounds"]

_GATHER = 5.0
"""Seconds that hosts or workers on their way are waited for when there are enough others."""
_FIRST_PATIENCE = 30.0
"""The same for the workers of the first round, which may take long to import."""


class Rounds:
    """The workers, the round that they are in, and the next one.

    settle() is to be called after whatever may change who can be in a round. `problem` is then why
    there can be none, if that is certain.
    """

    def __init__(self, spec: JobSpec, pool: Pool) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self.workers = Workers()
        self.wiring = Wiring(spec.network_interfaces)
        self._beginning = Beginning(self.workers, self.wiring)
        self.round: Round | None = None
        self.is_asking = False
        """Whether workers ask for their places, rather than be started anew for each round."""
        self.problem: HvlaunchError | None = None
        self._number = 0
        self._plan: Plan | None = None
        self._short_since: float | None = None
        self._is_short_told = False
        self._early = EarlyStart.of(spec, pool, self.wiring)
        """Until all workers of a static job were started."""
        self._patience: float | None = None
        """Until when others are waited for, though there are enough."""

    @property
    def has_begun(self) -> bool:
        """Whether all workers of the first round were started."""
        return self.round is not None and self._early is None

    @property
    def awaits_more(self) -> bool:
        """Whether there can be no round before other workers have asked too, or some time has passed."""
        if self.round is not None:
            return bool(self.round.staying) and self.round.state is not RoundState.RUNNING
        others = self.workers.size - len(self.workers.starting)
        return self._patience is not None and bool(self.workers.starting) and others < self.most

    @property
    def awaits_ends(self) -> bool:
        """Whether workers that never ask have to end before there can be another round."""
        return not self.is_asking and self.workers.size > 0 and not self._is_running and self._early is None

    # What the engine tells

    def changed(self) -> None:
        """Hosts or workers came or went: the plan for the next round is to be made anew."""
        self._plan = None

    def ready(self, host: PoolHost) -> list[Action]:
        """The host is ready: what may be tried at once."""
        self.changed()
        return self._early.probes(host) if self._early is not None else []

    def found(self, host: str, target: str, address: str | None, now: float) -> list[Action]:
        """The host reaches the other one at the address; None: it has tried all."""
        self.wiring.add(host, target, address)
        return self._start_early(host, now) + self._start_early(target, now)

    def lost(self, host: str, workers: Iterable[Worker] = ()) -> None:
        """The host is gone, or going, with its workers."""
        self.changed()
        self.wiring.forget(host)
        if self.round is not None:
            self.round.staying.difference_update(worker.seat for worker in workers)

    @property
    def next_hosts(self) -> list[str]:
        """The hosts of the planned round, in order of rank."""
        return [host.name for host in self._plan.hosts] if self._plan is not None else []

    def reached(self, host: str, now: float) -> list[Action]:
        """The host has said where it reaches the rendezvous."""
        if self._plan is not None:
            self._plan.unreached.discard(host)
        return self._start_early(host, now)

    def asked(self, worker: Worker, last_round: int, commit: int) -> bool:
        """The worker wants a place in a round newer than that; False where it has one already."""
        if not self.is_asking:
            self._take_back()
        if worker.round is not None and last_round != worker.round:
            return False
        if self.round is not None and worker.round == self.round.number:
            self.round.staying.discard(worker.seat)
        worker.round = None
        worker.is_waiting = True
        worker.last_round = max(worker.last_round, last_round)
        worker.commit = max(worker.commit, commit)
        self.workers.starting.discard(worker.seat)
        self.changed()
        return True

    def _take_back(self) -> None:
        """The first worker asks: so the round that they were started for is one to come, and none that there is."""
        self.is_asking = True
        for worker in self.workers:
            worker.round = None
            if not worker.is_ending:
                self.workers.starting.add(worker.seat)
        if self.round is not None:
            broken = self.round.state is not RoundState.RUNNING
            self._number = self.round.number + broken
        self.round = None

    # Who is wanted

    def is_wanted(self, worker: Worker, now: float) -> bool:
        """Whether its slot is still one of the pool's, on a host that may be used."""
        host = self._pool.get(worker.host)
        return host is not None and host.is_usable(now) and worker.slot < self._pool.slots(host)

    def members(self) -> list[Worker]:
        """The living workers of the round that have not left it, in order of rank."""
        current = self.round
        if current is None:
            return []
        return self.workers.of(seat for seat in current.places if seat in current.staying)

    def is_member(self, worker: Worker) -> bool:
        return self.round is not None and worker.round == self.round.number

    @property
    def least(self) -> int:
        """How many workers a round must have."""
        return 1 if self._elastic is None else self._elastic.min_np

    @property
    def most(self) -> float:
        """How many it may have."""
        if self._elastic is None:
            return float("inf") if self._spec.np is None else self._spec.np
        return float("inf") if self._elastic.max_np is None else self._elastic.max_np

    def in_order(self, hosts: Iterable[PoolHost]) -> list[PoolHost]:
        """The hosts: those of the last round first, in their order; then as the pool has them."""
        before = {name: index for index, name in enumerate(self.round.hosts)} if self.round else {}
        return sorted(hosts, key=lambda host: before.get(host.name, len(before)))

    # The next round

    def settle(self, now: float) -> list[Action]:
        """What is to be done for the next round, or for the one that there is."""
        is_busy = self._is_going_on if self.is_asking else bool(self.workers.size) and self.has_begun
        wanted = [] if self._is_running or is_busy else self._form(now)
        return wanted + self._grow(now) if self._is_running and self._elastic is not None else wanted

    @property
    def _is_running(self) -> bool:
        return self.has_begun and self.round is not None and self.round.state is RoundState.RUNNING

    @property
    def _is_going_on(self) -> bool:
        """Whether the round is to change at its next commit, which none of its workers has reached yet."""
        current = self.round
        return current is not None and current.state is RoundState.CHANGING and current.leave_by is None

    def _form(self, now: float) -> list[Action]:
        wanted: list[Action] = []
        if self._plan is None:
            self._plan = self._choose(now)
            if self._plan is None:
                return self._wait_for_more(now)
            facts = {host.name: host.facts for host in self._plan.hosts if host.facts is not None}
            if self.round is None and not self.is_asking:
                wanted += [tell.SharedMachine(names) for names in shared_machines(facts)]
            wanted += self.wiring.want(facts, now)
        plan = self._plan
        if not self.wiring.is_settled(now, others=not plan.unreached):
            return wanted
        network = self.wiring.network
        problem = network.problem() if network is not None else None
        if problem is not None:
            self.problem = problem
            return wanted
        self._plan = self._short_since = self._patience = None
        return wanted + (self._place(plan, now) if self.is_asking else self._start(plan, now))

    def _choose(self, now: float) -> Plan | None:
        if self.is_asking:
            return self._choose_waiting(now)
        return self._choose_all(now) if self._elastic is None else self._choose_slots(now)

    def _choose_all(self, now: float) -> Plan | None:
        """A static job's only round: every host must have got ready."""
        if self._pool.connecting or self._pool.errors:
            return None
        hosts = [host for host in self._pool if host.is_usable(now)]
        try:
            places = place([(host.name, self._pool.slots(host)) for host in hosts], self._spec.np)
        except HvlaunchError as error:
            self.problem = error
            return None
        return Plan.of(hosts, {(one.host, one.local_rank): one for one in places})

    def _choose_slots(self, now: float) -> Plan | None:
        """A round for workers that never ask: they are started at once in as many slots as there are."""
        hosts = self.in_order(host for host in self._pool if host.is_usable(now))
        total = min(self._pool.capacity(hosts), self.most)
        if total < self.least or not self._has_gathered(total, now):
            return None
        counts: list[tuple[str, Sequence[int]]] = []
        for host in hosts:
            taken = int(min(self._pool.slots(host), total))
            counts.append((host.name, range(taken)))
            total -= taken
        return Plan.of(hosts, seats(counts))

    def _has_gathered(self, total: float, now: float) -> bool:
        """Whether to begin with so many workers, or to wait for hosts that are still connecting."""
        if not self._pool.connecting or total >= self.most or self.round is not None:
            return True
        if total >= (self._spec.np or self.least):
            self._patience = self._patience or now + _GATHER
        return self._patience is not None and now >= self._patience

    def _choose_waiting(self, now: float) -> Plan | None:
        """A round of those who have asked, once all survivors of the last one have."""
        if self.round is not None and self.round.staying:
            return None
        waiting = self.workers.waiting
        wanted = [worker for worker in waiting if self.is_wanted(worker, now)]
        hosts = self.in_order(self._pool)
        index = {host.name: number for number, host in enumerate(hosts)}
        wanted.sort(key=lambda worker: (not worker.has_state, index[worker.host], worker.slot))
        if not any(worker.has_state for worker in wanted):
            wanted = hand_over(wanted, [worker for worker in waiting if worker.has_state])
        if len(wanted) < self.least or not self._is_first_complete(wanted, now):
            return None
        chosen = wanted if self.most > len(wanted) else wanted[: int(self.most)]
        return Plan.of(*seated(hosts, chosen))

    def _is_first_complete(self, waiting: Sequence[Worker], now: float) -> bool:
        """Whether a round of none but new workers may begin while others are still starting."""
        if any(worker.has_state for worker in waiting) or len(waiting) >= self.most:
            return True
        self._patience = self._patience or now + _FIRST_PATIENCE
        return not self.workers.starting or now >= self._patience

    @property
    def _is_beginning(self) -> bool:
        """Whether hosts that the job begins with have yet to get ready, for which they have a time of their own."""
        return self.round is None and self._pool.has_newcomers

    def _wait_for_more(self, now: float) -> list[Action]:
        """There are too few for a round."""
        if self._elastic is None:
            return []
        slots = self._pool.capacity([host for host in self._pool if host.is_usable(now)])
        seconds = self._elastic.elastic_timeout
        if self._short_since is None:
            self._short_since, self._is_short_told = now, False
        is_coming = self.round is None and self._pool.has_more(now)
        if not self._is_short_told and slots < self.least and not is_coming:
            self._is_short_told = True
            return [tell.SlotsLacking(self.least, slots, seconds)]
        if now >= self._short_since + seconds and not self._is_beginning:
            errors = "".join(f"\n{error}" for error in self._pool.failures)
            self.problem = NotEnoughSlotsInTime(self.least, slots, seconds, errors)
        return []

    # Its beginning

    def _begin(self, places: Mapping[Seat, Placement], now: float, commit: int = -1) -> Round:
        before = self.round
        self.round = Round(self._number, places, now, commit=commit)
        if before is not None:
            self.round.cause = before.cause
            before.committed(commit, now)  # who has asked may have told of it before its beat did
            is_planned = before.state is not RoundState.BROKEN
            self.round.follows_gain = is_planned and (before.follows_gain or before.is_fruitful(now))
        self._number += 1
        return self.round

    def _start(self, plan: Plan, now: float) -> list[Action]:
        """Start all workers of a round, but for those that were early."""
        early, self._early = self._early, None
        started = early.started if early is not None else set()
        current = self.round if started else None
        return self._beginning.start(plan, current or self._begin(plan.places, now), started, now)

    def _start_early(self, name: str, now: float) -> list[Action]:
        """Start a host's workers while other hosts still connect, if nothing that they need to know can change."""
        early, host = self._early, self._pool.get(name)
        if early is None or host is None or not self._pool.connecting or self._pool.errors:
            return []
        network = early.network(host)
        if network is None:
            return []
        if self.round is None:
            places = {(one, slot): at for one, slots in early.places.items() for slot, at in slots.items()}
            self._begin(places, now)
        early.started.add(name)
        return self._beginning.launch(host, early.places[name], network, 0, now)

    def _place(self, plan: Plan, now: float) -> list[Action]:
        """Tell those who asked their places."""
        newest = max(self.workers.of(plan.places), key=lambda worker: worker.commit)
        return self._beginning.place(plan, self._begin(plan.places, now, newest.commit), newest)

    # Growing

    def fill(self, now: float) -> list[Action]:
        """Start workers that will ask, in free slots: for rounds to come, and as spares."""
        if not self.is_asking or self._elastic is None:
            return []
        room = self.most + self._elastic.spares - sum(not worker.is_ending for worker in self.workers)
        free: dict[str, list[int]] = {}
        hosts = self.in_order(host for host in self._pool if host.is_usable(now))
        for host in hosts:
            if not host.has_tried_rendezvous:
                continue
            for slot in range(self._pool.slots(host)):
                cooldown = self.workers.cooldowns.get((host.name, slot))
                if room < 1 or self.workers.at((host.name, slot)) or (cooldown and cooldown.holds(now)):
                    continue
                free.setdefault(host.name, []).append(slot)
                room -= 1
        if not free:
            return []
        planned = seats(
            (host.name, sorted([*(one.slot for one in self.workers.on(host.name)), *free.get(host.name, ())]))
            for host in hosts
        )
        starts: list[Action] = []
        for name, slots in free.items():
            host = self._pool[name]
            network = HostNetwork(
                master_addr=LOOPBACK, master_port=0, interface=None, rendezvous=host.rendezvous
            )
            places = {slot: planned[name, slot] for slot in slots}
            starts += self._beginning.launch(host, places, network, self._number, now, will_ask=True)
        return starts

    def _grow(self, now: float) -> list[Action]:
        """Let the running round end where a larger one, or one without those that are to leave, can follow."""
        current = self.round
        if current is None:
            return []
        members = self.members()
        leaving = [worker for worker in members if not self.is_wanted(worker, now)]
        if leaving and (not self.is_asking or len(leaving) < len(members)):
            return self.change(why.WorkersToLeave(tuple(dict.fromkeys(one.host for one in leaving))))
        room = self.most - len(current.places) + len(leaving)
        more = self._more(now) if room > 0 else 0
        if not more:
            self._patience = None
            return []
        self._patience = self._patience or now + _GATHER
        on_the_way = self.workers.starting if self.is_asking else self._pool.connecting
        if on_the_way and now < self._patience and more < room:
            return []
        return self.change(why.MoreWorkers(more))

    def _more(self, now: float) -> int:
        """By how many workers the next round could be larger."""
        if self.is_asking:
            return sum(self.is_wanted(worker, now) for worker in self.workers.waiting)
        able = self._pool.capacity([host for host in self._pool if host.is_usable(now)])
        return max(0, able - len(self.round.places)) if self.round is not None else 0

    def change(self, cause: why.Cause) -> list[Action]:
        """Let the running round end at its next commit; workers that never ask are to be stopped by the caller."""
        self._patience = None
        if self.round is None:
            return []
        self.round.state, self.round.cause = RoundState.CHANGING, cause
        return [do.Change(self.round.number, cause)] if self.is_asking else []

    # Times

    def deadlines(self, now: float) -> list[float]:
        """When settle() has to be called again, if nothing happens."""
        found = [] if self._patience is None or self._patience <= now else [self._patience]
        found += self._pool.wake_ups(now)
        if self.is_asking:
            found += [cooldown.until for cooldown in self.workers.cooldowns.values() if cooldown.holds(now)]
        if self._plan is not None and self.wiring.deadline is not None and self.wiring.deadline > now:
            found.append(self.wiring.deadline)
        may_end = not self._is_beginning and self._plan is None
        if may_end and self._short_since is not None and self._elastic is not None:
            found.append(self._short_since + self._elastic.elastic_timeout)
        return found
