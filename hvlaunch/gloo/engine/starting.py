"""How a round begins: workers are started in their slots, some early, or those that have asked are told their places. Pure."""

from collections.abc import Container, Sequence

from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.actions import Action, HostNetwork
from hvlaunch.gloo.engine.life import State
from hvlaunch.gloo.engine.network import Wiring, candidates, interface_of
from hvlaunch.gloo.engine.pool import Pool, PoolHost
from hvlaunch.gloo.engine.round import Round
from hvlaunch.gloo.engine.seating import Plan, by_host
from hvlaunch.gloo.engine.workers import Worker, Workers
from hvlaunch.hosts.placement import Launch, place
from hvlaunch.job import JobSpec

__all__ = ["EarlyStart", "Starter"]


class Starter:
    """Brings workers into rounds whose hosts have found each other."""

    def __init__(self, workers: Workers, wiring: Wiring) -> None:
        self._workers = workers
        self._wiring = wiring

    def _network(self, host: PoolHost, port: int) -> HostNetwork:
        network = self._wiring.network
        assert network is not None  # noqa: S101 (a plan has one)
        return HostNetwork(
            master_addr=network.address(host.name),
            master_port=port,
            interface=network.interface(host.name),
            rendezvous=host.rendezvous,
        )

    def start(self, plan: Plan, current: Round, early: Container[str], now: float) -> list[Action]:
        """Start all workers of a round, but for those on hosts where they were early."""
        first = plan.hosts[0]
        port = first.facts.master_port if first.facts is not None else 0
        launches = by_host(plan.launches)
        starts: list[Action] = []
        for host in plan.hosts:
            if host.name not in early:
                network = self._network(host, port)
                starts += self.launch(host, launches[host.name], network, current.number, State.WORKING, now)
        address = self._network(first, port).master_addr
        return [tell.RoundStarting(current.number, len(plan.launches), plan.names, address, port), *starts]

    def launch(
        self,
        host: PoolHost,
        launches: Sequence[Launch],
        network: HostNetwork,
        number: int,
        state: State,
        now: float,
    ) -> list[Action]:
        """Start these workers of a host: WORKING in the round, or STARTING to ask for a place in one from there on."""
        if host.facts is None:
            return []
        for launch in launches:
            self._workers.launch(launch, born=number, state=state, now=now)
        return [do.Start(host.name, number, tuple(launches), network, host.facts)]

    def place(self, plan: Plan, current: Round, newest: Worker, now: float) -> list[Action]:
        """Tell those who asked their places; `newest` is the one of them that has the newest commit."""
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        for launch in plan.launches:
            self._workers.place(launch, current.number, now)
        return [
            tell.RoundFormed(current.number, len(plan.launches), plan.names, current.cause),
            *(
                do.Assign(current.number, launch, networks[launch.host], newest.rank)
                for launch in plan.launches
            ),
        ]


class EarlyStart:
    """The hosts of a round whose places are known beforehand, in order of rank.

    What a host is told can't change any more when it has reached the address of rank 0's host that all
    would rather have, and the host before it in the ring has reached such an address of its own.
    """

    def __init__(self, launches: Sequence[Launch], pool: Pool, wiring: Wiring) -> None:
        self._pool = pool
        self._wiring = wiring
        self.launches = launches
        """Of all hosts, in order of rank."""
        self.on = by_host(launches)
        hosts = list(self.on)
        self.first, *others = hosts
        self._previous = dict(zip(others, hosts, strict=False))
        self._next = {before: host for host, before in self._previous.items()}
        self.started: set[str] = set()

    @classmethod
    def of(cls, spec: JobSpec, pool: Pool, wiring: Wiring) -> "EarlyStart | None":
        """None where all hosts have to be known: to count slots, or to open the rendezvous to them."""
        hosts = list(pool)
        is_known = len(hosts) > 1 and (spec.slots_per_host or all(host.host.slots for host in hosts))
        if spec.elastic is not None or spec.horovod or spec.network_interfaces or not is_known:
            return None
        places = place([(host.name, pool.slots(host)) for host in hosts], spec.np)
        return cls([Launch(at.local_rank, 0, at) for at in places], pool, wiring)

    def probes(self, host: PoolHost) -> list[Action]:
        """What can be tried now that the host is ready."""
        name = host.name
        pairs = [(other, name) for other in self._previous] if name == self.first else [(name, self.first)]
        if name in self._previous:
            pairs.append((self._previous[name], name))
        if name in self._next:
            pairs.append((name, self._next[name]))
        found: list[Action] = []
        for tries, target in pairs:
            known, aim = self._pool.get(tries), self._pool.get(target)
            if known is not None and aim is not None and known.facts and aim.facts:
                found += self._wiring.ask(tries, target, aim.facts)
        return found

    def network(self, host: PoolHost) -> HostNetwork | None:
        """What the host's workers are to be told; None where that may still change, or has been told."""
        first = self._pool[self.first]
        before = self._previous.get(host.name)
        if before is None or host.name in self.started or not host.has_tried_rendezvous:
            return None
        if first.facts is None or host.facts is None:
            return None
        master, own = candidates(first.facts)[:1], candidates(host.facts)[:1]
        if not (master and own and self._wiring.has_found(host.name, self.first, master[0])):
            return None
        if not self._wiring.has_found(before, host.name, own[0]):
            return None
        return HostNetwork(
            master_addr=master[0],
            master_port=first.facts.master_port,
            interface=interface_of(host.facts, own[0]),
            rendezvous=host.rendezvous,
        )
