# ruff: noqa: ARG002 (the two ways have the same questions, and not each needs all that is asked with)
"""The plan of a round, its beginning, and the two ways to form it: new workers, or places on request. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvlaunch.engine import actions as do
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, HostAddress, HostNetwork
from hvlaunch.engine.causes import Cause
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.network import LOOPBACK, SOCKETS, Probing
from hvlaunch.engine.pool import Pool, PoolHost
from hvlaunch.engine.round import Round, RoundState
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.engine.workers import StacksBeforeKill, Worker, Workers, WorkerState, gently
from hvlaunch.errors import BadUsage, HostsFailed, HvlaunchError, NotEnoughSlots
from hvlaunch.hosts.placement import Launch, Placement, place, seats
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = [
    "GATHERING_TIME",
    "AskingWorkers",
    "Bounds",
    "Forming",
    "FreshWorkers",
    "Plan",
    "Starter",
    "in_order",
]

GATHERING_TIME = 5.0
"""Seconds to wait for hosts or workers on their way if there are enough others."""
_FIRST_GATHERING_TIME = 30.0
"""Seconds to wait for the first round's workers, whose imports may take long."""


class Plan(NamedTuple):
    """The next round, which waits until its hosts have probed each other."""

    hosts: list[PoolHost]
    """In order of rank."""
    launches: Sequence[Launch]
    """In order of rank."""
    unreached: set[str]
    """Hosts that have not reported yet how they reach the rendezvous."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(host.name for host in self.hosts)

    @property
    def facts(self) -> dict[str, HostFacts]:
        """Facts by host name."""
        return {host.name: host.facts for host in self.hosts if host.facts is not None}

    @classmethod
    def with_launches(cls, hosts: Iterable[PoolHost], launches: Sequence[Launch]) -> "Plan":
        """Plan a round on the hosts that the launches name."""
        names = {launch.host for launch in launches}
        used = [host for host in hosts if host.name in names]
        return cls(used, launches, {host.name for host in used if not host.has_tried_rendezvous})


def _by_host(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """Return the launches of each host, in their order."""
    launches_by_host: dict[str, list[Launch]] = {}
    for launch in launches:
        launches_by_host.setdefault(launch.host, []).append(launch)
    return launches_by_host


def in_order(hosts: Iterable[PoolHost], current: Round | None) -> list[PoolHost]:
    """Sort the hosts: those of the last round first, in its order, then the others as given."""
    before = {name: index for index, name in enumerate(current.hosts)} if current is not None else {}
    return sorted(hosts, key=lambda host: before.get(host.name, len(before)))


def _hand_over(new: list[Worker], leaving: list[Worker]) -> list[Worker]:
    """Order workers: a leaving worker with the newest commit comes first, to hand it over."""
    if not leaving:
        return new
    newest = max(leaving, key=lambda worker: worker.commit)
    return [newest, *new, *(worker for worker in leaving if worker is not newest)]


def _seniority(worker: Worker) -> tuple[bool, int]:
    return (False, worker.rank) if worker.has_state else (True, worker.slot)


def _seated(
    hosts: Sequence[PoolHost],
    chosen: Sequence[Worker],
    near_hosts_first: Callable[[list[PoolHost]], list[PoolHost]],
) -> tuple[list[PoolHost], list[Launch]]:
    """Return the used hosts and the launches on them, in order of rank.

    Hosts with survivors come first, then the others as given, before near hosts are put side by side. On each host survivors come first, in the order of their
    ranks, then the other workers by slot. So rank 0 is the oldest survivor, if any.
    """
    on: dict[str, list[Worker]] = {}
    for worker in sorted(chosen, key=_seniority):
        on.setdefault(worker.host, []).append(worker)
    used = [host for host in hosts if host.name in on]
    # Stable: within both groups the given order stays.
    used.sort(key=lambda host: not any(worker.has_state for worker in on[host.name]))
    used = near_hosts_first(used)
    starts = {worker.seat: worker.start for worker in chosen}
    places = seats((host.name, [worker.slot for worker in on[host.name]]) for host in used)
    return used, [Launch(seat[1], starts[seat], place) for seat, place in places.items()]


class Starter:
    """Brings workers into rounds whose hosts have probed each other."""

    def __init__(self, spec: JobSpec, workers: Workers, probing: Probing) -> None:
        self._spec = spec
        self._workers = workers
        self._probing = probing
        self._variables: Mapping[str, Mapping[str, str]] = {}
        """Variables for the choice of adapters, by host."""
        self._role_starts: dict[int, do.Start] = {}
        """The order by which each rank of a job with roles was started."""

    def _choose(self, plan: Plan, number: int) -> list[Action]:
        """Choose the adapters of a round."""
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        self._variables = {}
        texts = {name: facts.fabric for name, facts in plan.facts.items() if facts.fabric is not None}
        # Without the hardware of a host, or with a single host, the usual variables are as good.
        if self._spec.nccl != "auto" or len(plan.hosts) < 2 or len(texts) < len(plan.hosts):  # noqa: PLR2004 (two hosts)
            return []
        from hvlaunch.engine.fabric import choose, fabric_of  # noqa: PLC0415 (few jobs have a choice)

        fabrics = {name: fabric_of(text) for name, text in texts.items()}
        has_interfaces = bool(self._spec.network_interfaces)
        choice = choose(fabrics, network, self._spec.env, has_interfaces=has_interfaces)
        self._variables = choice.variables
        return [tell.NetworkChosen(number, choice.reasons, choice.is_split)]

    def _variables_of(self, host: str, interface: str | None) -> Mapping[str, str] | None:
        """Return the variables for adapters; None for the usual ones."""
        variables = self._variables.get(host)
        # The user's own must stay: workers that move from round to round set these anew.
        if variables is None and interface is not None and not self._spec.env.keys().isdisjoint(SOCKETS):
            return {name: interface for name in SOCKETS if name not in self._spec.env}
        return variables

    def _network(self, host: PoolHost, port: int, hosts: tuple[HostAddress, ...] = ()) -> HostNetwork:
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        interface = network.interface(host.name)
        return HostNetwork(
            master_addr=network.address(host.name),
            master_port=port,
            interface=interface,
            rendezvous=host.rendezvous,
            address=network.own_address(host.name),
            hosts=hosts,
            variables=self._variables_of(host.name, interface),
        )

    def _addresses(self, plan: Plan) -> tuple[HostAddress, ...]:
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        return tuple(
            HostAddress(name, network.own_address(name), len(launches), plan.facts[name].more_ports)
            for name, launches in _by_host(plan.launches).items()
        )

    def start(self, plan: Plan, current: Round, now: float) -> list[Action]:
        """Start all workers of a round."""
        if plan.launches[0].role is not None:
            return self._start_roles(plan, current, now)
        first = plan.hosts[0]
        # Rank 0's agent keeps this port bound until rank 0 listens there.
        port = first.facts.master_port if first.facts is not None else 0
        launches, addresses = _by_host(plan.launches), self._addresses(plan)
        choices = self._choose(plan, current.number)
        starts: list[Action] = []
        for host in plan.hosts:
            network = self._network(host, port, addresses)
            starts += self.launch(
                host, launches[host.name], network, current.number, WorkerState.WORKING, now
            )
        address = self._network(first, port).master_addr
        starting = tell.RoundStarting(current.number, len(plan.launches), plan.names, address, port)
        return [*choices, starting, *starts]

    def _start_roles(self, plan: Plan, current: Round, now: float) -> list[Action]:
        """Start the workers of each role with a MASTER_ADDR and MASTER_PORT of its own."""
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        everybody, choices = self._addresses(plan), self._choose(plan, current.number)
        by_name = {address.name: address for address in everybody}
        pool = {host.name: host for host in plan.hosts}
        by_role: dict[int, list[Launch]] = {}
        for launch in plan.launches:
            by_role.setdefault(launch.role.number if launch.role else 0, []).append(launch)
        starts: list[do.Start] = []
        for index, members in by_role.items():
            by_host = _by_host(members)
            # The first of these ports are the masters' of the roles, as hosts/roles.py has them.
            first, port = members[0].host, by_name[members[0].host].ports[index]
            hosts = tuple(by_name[name]._replace(workers=len(here)) for name, here in by_host.items())
            for name, here in by_host.items():
                of_role = self._network(pool[name], port, hosts)._replace(
                    master_addr=network.address(name, first)
                )
                for start in self.launch(pool[name], here, of_role, current.number, WorkerState.WORKING, now):
                    order = start._replace(job_hosts=everybody)
                    self._role_starts.update(dict.fromkeys((launch.place.rank for launch in here), order))
                    starts.append(order)
        master = starts[0].network
        return [
            *choices,
            tell.RoundStarting(
                current.number, len(plan.launches), plan.names, master.master_addr, master.master_port
            ),
            *starts,
        ]

    def start_again(self, ranks: range, number: int, now: float) -> list[Action]:
        """Start the next workers of these ranks in their slots, as those before were started."""
        starts: dict[str, do.Start] = {}
        for rank in ranks:
            order = self._role_starts[rank]
            before = next(launch for launch in order.launches if launch.place.rank == rank)
            launch = self._workers.next_launch(before.seat, before.place)._replace(role=before.role)
            self._workers.launch(launch, born=number, state=WorkerState.WORKING, now=now)
            others = starts[order.host].launches if order.host in starts else ()
            starts[order.host] = order._replace(launches=(*others, launch))
        return [*starts.values()]

    def launch(
        self,
        host: PoolHost,
        launches: Sequence[Launch],
        network: HostNetwork,
        number: int,
        state: WorkerState,
        now: float,
    ) -> list[do.Start]:
        """Start these workers of a host: WORKING in the round, or STARTING to ask for a place from that round on."""
        if host.facts is None:
            return []
        for launch in launches:
            self._workers.launch(launch, born=number, state=state, now=now)
        return [do.Start(host.name, number, tuple(launches), network, host.facts)]

    def assign_places(self, plan: Plan, current: Round, newest: Worker, now: float) -> list[Action]:
        """Place the workers that asked; `newest` is the one with the newest commit."""
        choices = self._choose(plan, current.number)
        # Workers that ask meet at the rendezvous, without a MASTER_PORT.
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        for launch in plan.launches:
            self._workers.give_place(launch, current.number, now)
        return [
            *choices,
            tell.RoundFormed(current.number, len(plan.launches), plan.names, current.cause),
            *(
                do.Assign(current.number, launch, networks[launch.host], newest.rank)
                for launch in plan.launches
            ),
        ]


class Bounds(NamedTuple):
    """Least and largest number of workers in a round."""

    least: int
    most: float

    @classmethod
    def of_spec(cls, spec: JobSpec) -> "Bounds":
        elastic = spec.elastic
        least, most = (1, spec.np) if elastic is None else (elastic.min_np, elastic.max_np)
        return cls(least, float("inf") if most is None else most)


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

        With --map-by node these are as many hosts as workers: each gets one before any gets two. Raises HvlaunchError for lack
        of slots.
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
            able = _hand_over(able, [worker for worker in waiting if worker.has_state])
        if len(able) < self._bounds.least or not self._is_first_complete(able, now):
            return None
        if self._is_newest_away(able, current):
            return None  # until its worker returns, or the host is lost
        chosen = able if self._bounds.most > len(able) else able[: int(self._bounds.most)]
        return Plan.with_launches(*_seated(hosts, chosen, self._near_first))

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
