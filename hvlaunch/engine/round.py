"""One round: its plan and start, its state, its workers' ends and their cause, and whether another round may follow. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from hvlaunch.engine import actions as do
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, HostAddress, HostNetwork
from hvlaunch.engine.causes import (
    Cause,
    JobHung,
    NoCommit,
    NoProgress,
    NotMet,
    RestartsUsedUp,
    WorkerEnded,
    WorkerLeft,
)
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.hosts import SOCKETS, PoolHost, Probing
from hvlaunch.engine.workers import Life, Worker, Workers, WorkerState
from hvlaunch.errors import Problem
from hvlaunch.hosts.placement import Launch, seats
from hvlaunch.job import ElasticOptions, JobSpec, RestartLimit, WorkerExit
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "FRUITFUL",
    "FRUITLESS_IN_A_ROW",
    "ROUND_TRANSITIONS",
    "STARTS_IN_A_ROW",
    "Bounds",
    "Hold",
    "Plan",
    "Restarts",
    "Round",
    "RoundState",
    "RoundTrigger",
    "Settled",
    "Starter",
    "cause_of",
    "first_failed",
    "hand_over",
    "in_order",
    "may_be_consequence",
    "seated",
]

_OWN, _OWN_WHEN_STOPPED, _UNCLEAR, _CONSEQUENCE = range(4)


def may_be_consequence(end: WorkerExit) -> bool:
    """True if another worker may have caused this failure, judging by the worker's last output."""
    return _weight(end) > _OWN


def first_failed(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """Return the first failure by the time of the worker's end; news of it may arrive in another order."""
    return min(_failures(ends), key=lambda end: (end.when, end.rank), default=None)


def cause_of(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """Return the first worker with an error of its own, even if hvlaunch had stopped it; otherwise the first failure."""
    ends = tuple(ends)
    suspects = _failures(ends)
    if suspects:
        suspects += [end for end in ends if end.stopped and end.look in ("cause", "unclear")]
    return min(suspects, key=lambda end: (_weight(end), end.when, end.rank), default=None)


def _failures(ends: Iterable[WorkerExit]) -> list[WorkerExit]:
    return [end for end in ends if not end.ok and not end.stopped]


def _weight(end: WorkerExit) -> int:
    # The kernel's word counts more than the last lines of output.
    if end.oom_killed or end.port_taken_by is not None:
        return _OWN
    match end.look:
        case "consequence":
            return _CONSEQUENCE
        case "unclear":
            return _UNCLEAR
        case "cause":
            return _OWN_WHEN_STOPPED if end.stopped or end.was_told else _OWN
        case _:
            return _CONSEQUENCE if end.was_told else _OWN


FRUITFUL = 15.0
"""Seconds after which a round counts as fruitful even without a commit."""
FRUITLESS_IN_A_ROW = 3
STARTS_IN_A_ROW = 5
"""Failures of a slot's workers before they ask for a place, and of a role's restarts, which begin after a delay."""


class Restarts:
    """Counts failures that led to another round, within --restart-window. In a static job none does."""

    def __init__(
        self, options: ElasticOptions | RestartLimit | None, most_fruitless: int = FRUITLESS_IN_A_ROW
    ) -> None:
        self._most_fruitless = most_fruitless
        self._limit = 0 if options is None else options.max_restarts
        self._window = 0.0 if options is None else options.restart_window
        self._failed: deque[float] = deque()
        self._suspects: list[str | None] = []
        """Host of the first failure of each fruitless round in a row, if known."""

    @property
    def fruitless(self) -> int:
        """Number of failures in a row before which there was no progress."""
        return len(self._suspects)

    def gained(self) -> None:
        """Note a fruitful round."""
        self._suspects.clear()

    def remedied(self) -> None:
        """Note a late remedy for the last failure: the next round runs without its host."""
        del self._suspects[-1:]

    def failed(
        self, now: float, *, fruitful: bool | None, host: str | None = None
    ) -> RestartsUsedUp | NoProgress | None:
        """Count a failure, which began at `host`, and return why the job ends, if it does.

        `fruitful` is None if the failure says nothing about progress.
        """
        # The oldest failure is at the left.
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        self._failed.append(now)
        if fruitful:
            self.gained()
        elif fruitful is not None:
            self._suspects.append(host)
        if self._limit is not None and len(self._failed) > self._limit:
            return RestartsUsedUp(self._limit)
        times = len(self._suspects)
        if times < self._most_fruitless:
            return None
        hosts = [name for name in self._suspects if name is not None]
        suspect = max(hosts, key=hosts.count, default="")
        return NoProgress(times, suspect if hosts.count(suspect) > 1 else None)


class RoundState(Enum):
    """State of a round."""

    RUNNING = "its workers are in it"
    CHANGING = (
        "its workers are to ask for their next places at their next commit, or are stopped for a change"
    )
    BROKEN = "its workers are to leave it at once"
    LEFT = "another round takes its place"


class RoundTrigger(Enum):
    """Causes of a change of state."""

    CHANGED = "a larger round can follow, or workers have to leave, or a new training begins"
    FAILED = "a worker or a host has failed, or the round makes no progress"
    FOLLOWED = "the next round begins, or the workers turn out to ask for their places"


ROUND_TRANSITIONS: dict[RoundState, Mapping[RoundTrigger, RoundState]] = {
    RoundState.RUNNING: {
        RoundTrigger.CHANGED: RoundState.CHANGING,
        RoundTrigger.FAILED: RoundState.BROKEN,
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.CHANGING: {
        RoundTrigger.FAILED: RoundState.BROKEN,
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.BROKEN: {
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.LEFT: {},
}
"""A failure that waits for its cause (Wait.SETTLING) is not a state: a changing round may have one too."""


class Round:
    """The workers of a round: their meeting, failures and ends, and the cause of its end. Times are seconds of the driver's clock.

    Other modules read its attributes. Its methods alone write them.
    """

    def __init__(self, number: int, launches: Sequence[Launch], now: float, *, commit: int = -1) -> None:
        self.number = number
        self.size = len(launches)
        self.started_at = now
        self._life = Life(f"round {number}", RoundState.RUNNING, ROUND_TRANSITIONS)
        self.cause: Cause | None = None
        """Why the round ended, or is to end; at first, why the round before it did."""
        self._broken_at: float | None = None
        self.culprit: str | None = None
        """The host whose failure ended the round."""
        self.suspect: WorkerEnded | None = None
        """The round's failure, until another failure turns out to be its cause."""
        self.is_unexplained = False
        """True if the round failed, and no worker or host is known to be the cause."""
        self.is_unknown = False
        """True if the fate of some workers stays unknown."""
        self.has_more_time = False
        """True if the driver checked too late which workers have met, and has given them as long again."""
        self.met: set[int] = set()
        """Ranks that have met the others."""
        self.exits: dict[int, WorkerExit] = {}
        """Ends of workers, by rank."""
        self.started: set[int] = set()
        """Ranks that are known to have been started."""
        self.hosts = list(dict.fromkeys(launch.host for launch in launches))
        """Names in order of rank."""
        self.alone: dict[int, str] = {}
        """Library of each rank that never met others."""
        self.base = self.commit = commit
        """`base` is the newest commit at its beginning, `commit` the newest of all."""
        self.has_stepped = False
        """True if its workers have reported a new step."""

    @property
    def state(self) -> RoundState:
        return self._life.state

    # State

    def change(self, cause: Cause, now: float) -> None:
        """Let the round end where its workers lose nothing."""
        self._life.go(RoundTrigger.CHANGED, now)
        self.cause = cause

    def break_off(self, cause: Cause, now: float) -> None:
        """Make the workers leave the round at once."""
        self._life.go(RoundTrigger.FAILED, now)
        self.cause, self._broken_at = cause, now

    def leave(self, now: float) -> None:
        """Note that another round takes its place."""
        self._life.go(RoundTrigger.FOLLOWED, now)

    def inherit(self, before: "Round") -> None:
        """Take over the cause of the previous round's end."""
        self.cause = before.cause

    # Cause

    def fail(self, cause: Cause, *, host: str | None, is_host_lost: bool) -> bool:
        """Note a failure; True if `host` is the first known cause."""
        self.is_unknown = self.is_unknown or is_host_lost
        # Victims report in any order, and may come before the cause.
        is_first = self.state is not RoundState.BROKEN
        is_told_by_victim = isinstance(cause, WorkerLeft | NotMet | NoCommit | JobHung)
        if is_first and host is None and is_told_by_victim:
            self.is_unexplained = True
        if host is None or self.culprit is not None:
            return False
        self.culprit = host
        self.is_unexplained = False
        self.cause = cause  # its peers may have left before, because of what they saw of it
        return True

    def suspect_first(self, end: WorkerEnded) -> None:
        """Take this failure for the cause until a worker that is being stopped shows another."""
        self.suspect = end

    def convict(self, cause: WorkerEnded) -> None:
        """Settle on this failure as the cause."""
        self.is_unexplained = cause == self.suspect
        self.culprit, self.suspect = cause.host, None

    def take_doubt(self) -> bool:
        """Return True once after an unexplained failure: the network is in doubt."""
        is_doubtful = self.is_unexplained and len(self.hosts) > 1
        self.is_unexplained = self.is_unexplained and not is_doubtful
        return is_doubtful

    # Workers

    def add(self, end: WorkerExit) -> None:
        """Note how a worker of this round ended."""
        self.exits[end.rank] = end
        self.started.add(end.rank)

    def forgive(self, ranks: Iterable[int]) -> None:
        """Note that workers are to start again: their ends are no failures of the round."""
        for rank in self.exits.keys() & set(ranks):
            self.exits[rank] = self.exits[rank]._replace(stopped=True, look="silent")

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget how workers ended that have started again."""
        for rank in ranks:
            self.exits.pop(rank, None)

    def note_started(self, rank: int) -> None:
        """Note that the worker's process runs."""
        self.started.add(rank)

    def note_all_started(self) -> None:
        """Note that every worker runs, since each has asked for its place."""
        self.started.update(range(self.size))

    def note_alone(self, rank: int, library: str) -> None:
        """Note the library of a worker that never met others."""
        self.alone[rank] = library

    def has_met(self, rank: int) -> bool:
        """Note that the worker has met the others; True once all have."""
        self.met.add(rank)
        return len(self.met) == self.size

    def give_more_time(self) -> bool:
        """Give the workers more time to meet; False if they had it before."""
        is_first, self.has_more_time = not self.has_more_time, True
        return is_first

    def committed(self, commit: int) -> bool:
        """Note that a worker has this commit; True if it is the round's newest."""
        is_news = commit > self.commit
        self.commit = max(self.commit, commit)
        return is_news

    @property
    def least_commit(self) -> int:
        """The oldest commit of its workers with the state; -1 if they may have no commit."""
        return max(self.base, min(self.commit, 0))

    @property
    def has_progressed(self) -> bool:
        """True if its workers have reported a new commit or step."""
        return self.commit > self.base or self.has_stepped

    def is_fruitful(self, now: float, *, lost: float = 0.0) -> bool:
        """True if the round made progress, as far as is known by now. `lost` seconds of it passed without any."""
        # Later commits belong to workers that had not heard of the break.
        until = now if self._broken_at is None else self._broken_at
        return self.has_progressed or until - self.started_at - lost >= FRUITFUL

    @property
    def never_started(self) -> tuple[int, ...]:
        """Ranks without any news of their start."""
        return tuple(rank for rank in range(self.size) if rank not in self.started)

    @property
    def failure(self) -> WorkerExit | None:
        """The worker that caused the round's failure, if any has failed."""
        return cause_of(self.exits.values())


_MOST = 240.0


class Hold:
    """Holds rounds for a while after a round that ended early for a change; twice as long each time.

    A pool that flaps would otherwise restart its workers without end, and they would never have time to begin. Times are
    seconds of the driver's clock.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds for which a new round is held."""
        return self._seconds

    def keeps(self, current: Round, now: float, *, is_costly: bool) -> bool:
        """True if the round must not end for an optional change yet. `is_costly`: its workers would be stopped."""
        return is_costly and now < current.started_at + self._seconds

    def change(self, current: Round, now: float) -> None:
        """Note that the round ends for a change."""
        # The pool has been calm for long enough.
        if now >= current.started_at + max(FRUITFUL, 2 * self._seconds):
            self._seconds = 0.0
        else:
            self._seconds = min(_MOST, max(FRUITFUL, 2 * self._seconds))


class Bounds(NamedTuple):
    """Least and largest number of workers in a round."""

    least: int
    most: float

    @classmethod
    def of_spec(cls, spec: JobSpec) -> "Bounds":
        elastic = spec.elastic
        least, most = (1, spec.np) if elastic is None else (elastic.min_np, elastic.max_np)
        return cls(least, float("inf") if most is None else most)


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


class Settled(NamedTuple):
    """Actions for the next round; `problem` is the reason for a certain failure."""

    actions: list[Action]
    problem: Problem | None = None


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


def hand_over(new: list[Worker], leaving: list[Worker]) -> list[Worker]:
    """Order workers: a leaving worker with the newest commit comes first, to hand it over."""
    if not leaving:
        return new
    newest = max(leaving, key=lambda worker: worker.commit)
    return [newest, *new, *(worker for worker in leaving if worker is not newest)]


def _seniority(worker: Worker) -> tuple[bool, int]:
    return (False, worker.rank) if worker.has_state else (True, worker.slot)


def seated(
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
