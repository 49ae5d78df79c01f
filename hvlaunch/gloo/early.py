"""Workers of a static job that may start while other hosts still connect. Pure."""

from collections.abc import Sequence

from hvlaunch.gloo.actions import Action
from hvlaunch.gloo.network import candidates, interface_of
from hvlaunch.gloo.pool import Pool, PoolHost
from hvlaunch.gloo.wiring import Wiring
from hvlaunch.gloo.worker_env import HostNetwork
from hvlaunch.hosts.placement import Placement, place
from hvlaunch.job import JobSpec

__all__ = ["EarlyStart"]


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
