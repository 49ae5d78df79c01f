"""How a round begins: workers are started in their slots, some early, or those that have asked are told their places. Pure."""

from collections.abc import Container, Mapping, Sequence

from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.actions import Action, HostNetwork
from hvlaunch.gloo.engine.network import Wiring, candidates, interface_of
from hvlaunch.gloo.engine.pool import Pool, PoolHost
from hvlaunch.gloo.engine.round import Round
from hvlaunch.gloo.engine.seating import Plan
from hvlaunch.gloo.engine.workers import Worker, Workers
from hvlaunch.hosts.placement import Placement, place
from hvlaunch.job import JobSpec

__all__ = ["Beginning", "EarlyStart"]


class Beginning:
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
        by_host: dict[str, dict[int, Placement]] = {}
        for (name, slot), one in plan.places.items():
            by_host.setdefault(name, {})[slot] = one
        starts: list[Action] = []
        for host in plan.hosts:
            if host.name not in early:
                network = self._network(host, port)
                starts += self.launch(host, by_host[host.name], network, current.number, now)
        address = self._network(first, port).master_addr
        return [tell.RoundStarting(current.number, len(plan.places), plan.names, address, port), *starts]

    def launch(
        self,
        host: PoolHost,
        places: Mapping[int, Placement],
        network: HostNetwork,
        number: int,
        now: float,
        *,
        will_ask: bool = False,
    ) -> list[Action]:
        """Start workers in these slots of a host: in the round, or to ask for a place in one from there on."""
        if host.facts is None:
            return []
        workers = [
            self._workers.launch((host.name, slot), born=number, rank=one.rank, now=now)
            for slot, one in places.items()
        ]
        for worker in workers:
            if will_ask:
                self._workers.starting.add(worker.seat)
            else:
                worker.round = number
        starts = [worker.start for worker in workers]
        return [do.Start(host.name, number, [*places.values()], network, host.facts, [*places], starts)]

    def place(self, plan: Plan, current: Round, newest: Worker) -> list[Action]:
        """Tell those who asked their places; `newest` is the one of them that has the newest commit."""
        workers = self._workers.of(plan.places)
        for worker in workers:
            worker.round = worker.last_round = current.number
            worker.is_waiting = False
            worker.rank = plan.places[worker.seat].rank
            self._workers.cooldowns.pop(worker.seat, None)
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        return [
            tell.RoundFormed(current.number, len(workers), plan.names, current.cause),
            *(
                do.Assign(
                    worker.host,
                    worker.slot,
                    worker.start,
                    current.number,
                    plan.places[worker.seat],
                    networks[worker.host],
                    newest.rank,
                )
                for worker in workers
            ),
        ]


class EarlyStart:
    """The hosts of a round whose places are known beforehand, in order of rank.

    What a host is told can't change any more when it has reached the address of rank 0's host that all
    would rather have, and the host before it in the ring has reached such an address of its own.
    """

    def __init__(self, places: Sequence[Placement], pool: Pool, wiring: Wiring) -> None:
        self._pool = pool
        self._wiring = wiring
        self.places: dict[str, dict[int, Placement]] = {}
        """Of each host, by slot."""
        for one in places:
            self.places.setdefault(one.host, {})[one.local_rank] = one
        hosts = list(self.places)
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
        return cls(place([(host.name, pool.slots(host)) for host in hosts], spec.np), pool, wiring)

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
