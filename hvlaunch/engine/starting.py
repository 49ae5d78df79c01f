"""The plan of a round and its beginning: workers are started in their slots, or get their places. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvlaunch.engine import actions as do
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, HostAddress, HostNetwork
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.life import WorkerState
from hvlaunch.engine.network import Probing
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker, Workers
from hvlaunch.hosts.placement import Launch, seats

__all__ = ["Plan", "Starter", "by_host", "hand_over", "in_order", "seated"]


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


def by_host(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
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


def seated(hosts: Sequence[PoolHost], chosen: Sequence[Worker]) -> tuple[list[PoolHost], list[Launch]]:
    """Return the used hosts and the launches on them, in order of rank.

    Hosts with survivors come first, then the others as given. On each host survivors come first, in the order of their
    ranks, then the other workers by slot. So rank 0 is the oldest survivor, if any.
    """
    on: dict[str, list[Worker]] = {}
    for worker in sorted(chosen, key=_seniority):
        on.setdefault(worker.host, []).append(worker)
    used = [host for host in hosts if host.name in on]
    # Stable: within both groups the given order stays.
    used.sort(key=lambda host: not any(worker.has_state for worker in on[host.name]))
    starts = {worker.seat: worker.start for worker in chosen}
    places = seats((host.name, [worker.slot for worker in on[host.name]]) for host in used)
    return used, [Launch(seat[1], starts[seat], place) for seat, place in places.items()]


class Starter:
    """Brings workers into rounds whose hosts have probed each other."""

    def __init__(self, workers: Workers, probing: Probing) -> None:
        self._workers = workers
        self._probing = probing

    def _network(self, host: PoolHost, port: int, hosts: tuple[HostAddress, ...] = ()) -> HostNetwork:
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        return HostNetwork(
            master_addr=network.address(host.name),
            master_port=port,
            interface=network.interface(host.name),
            rendezvous=host.rendezvous,
            address=network.own_address(host.name),
            hosts=hosts,
        )

    def _addresses(self, plan: Plan) -> tuple[HostAddress, ...]:
        network = self._probing.network
        assert network is not None  # noqa: S101 (a plan has one)
        return tuple(
            HostAddress(name, network.own_address(name), len(launches))
            for name, launches in by_host(plan.launches).items()
        )

    def start(self, plan: Plan, current: Round, now: float) -> list[Action]:
        """Start all workers of a round."""
        first = plan.hosts[0]
        # Rank 0's agent keeps this port bound until rank 0 listens there.
        port = first.facts.master_port if first.facts is not None else 0
        launches, addresses = by_host(plan.launches), self._addresses(plan)
        starts: list[Action] = []
        for host in plan.hosts:
            network = self._network(host, port, addresses)
            starts += self.launch(
                host, launches[host.name], network, current.number, WorkerState.WORKING, now
            )
        address = self._network(first, port).master_addr
        return [tell.RoundStarting(current.number, len(plan.launches), plan.names, address, port), *starts]

    def launch(
        self,
        host: PoolHost,
        launches: Sequence[Launch],
        network: HostNetwork,
        number: int,
        state: WorkerState,
        now: float,
    ) -> list[Action]:
        """Start these workers of a host: WORKING in the round, or STARTING to ask for a place from that round on."""
        if host.facts is None:
            return []
        for launch in launches:
            self._workers.launch(launch, born=number, state=state, now=now)
        return [do.Start(host.name, number, tuple(launches), network, host.facts)]

    def assign_places(self, plan: Plan, current: Round, newest: Worker, now: float) -> list[Action]:
        """Place the workers that asked; `newest` is the one with the newest commit."""
        # Workers that ask meet at the rendezvous, without a MASTER_PORT.
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        for launch in plan.launches:
            self._workers.give_place(launch, current.number, now)
        return [
            tell.RoundFormed(current.number, len(plan.launches), plan.names, current.cause),
            *(
                do.Assign(current.number, launch, networks[launch.host], newest.rank)
                for launch in plan.launches
            ),
        ]
