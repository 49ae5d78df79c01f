"""Roles: the places of their workers, and the addresses by which workers of one role find those of another. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hvlaunch.hosts.placement import Launch, Placement, RolePlace, seats
from hvlaunch.job import Role
from hvlaunch.named_tuples import NamedTuple

__all__ = ["ADDRESSES", "EVERY", "RoleAddresses", "labels", "place_roles", "ports_by_host", "ranks_of"]

ADDRESSES = ("host", "host_ip")
"""Names in `{role:NAME:RANK:…}` beside ports."""
EVERY = "all"
"""The RANK that stands for all ranks."""


def ranks_of(roles: Sequence[Role], name: str) -> range:
    """Return the role's ranks in the job."""
    first = 0
    for role in roles:
        if role.name == name:
            return range(first, first + role.size)
        first += role.size
    return range(0)


def labels(roles: Sequence[Role]) -> list[str]:
    """Return role and rank of each worker, in order of the job's ranks: `gen:1`."""
    return [f"{role.name}:{rank}" for role in roles for rank in range(role.size)]


def place_roles(roles: Sequence[Role]) -> list[Launch]:
    """Return the workers' places in order of the job's ranks: no two workers have the same slot of a host."""
    totals: Counter[str] = Counter()
    for role in roles:
        for host, count in role.workers:
            totals[host] += count
    taken: Counter[str] = Counter()
    launches: list[Launch] = []
    names = list(totals)
    for index, role in enumerate(roles):
        for at in seats((host, range(count)) for host, count in role.workers).values():
            slot = taken[at.host]
            taken[at.host] += 1
            place = Placement(
                host=at.host,
                rank=len(launches),
                local_rank=slot,
                cross_rank=names.index(at.host),
                size=sum(totals.values()),
                local_size=totals[at.host],
                cross_size=len(names),
                group_rank=names.index(at.host),
                group_size=len(names),
            )
            launches.append(Launch(slot, 0, place, RolePlace(index, role.name, at)))
    return launches


def ports_by_host(roles: Sequence[Role]) -> Counter[str]:
    """Return the number of ports that each host keeps: a MASTER_PORT for each role, then those of its workers by slot."""
    counts: Counter[str] = Counter()
    for role in roles:
        for host, count in role.workers:
            counts[host] = (counts[host] or len(roles)) + count * len(role.templates.ports)
    return counts


class _Worker(NamedTuple):
    """A worker, as the others know it."""

    host: str
    address: str
    ports: Mapping[str, object]


class RoleAddresses:
    """The addresses of all workers. `hosts` has address and ports of each host, by its name."""

    def __init__(self, roles: Sequence[Role], hosts: Mapping[str, tuple[str, Sequence[object]]]) -> None:
        self._workers: dict[str, list[_Worker]] = {role.name: [] for role in roles}
        used: Counter[str] = Counter(dict.fromkeys(hosts, len(roles)))
        # In order of the slots, as ports_by_host() counts.
        for launch in place_roles(roles):
            assert launch.role is not None  # noqa: S101 (all of them have one)
            names = roles[launch.role.number].templates.ports
            address, ports = hosts[launch.host]
            mine = ports[used[launch.host] :][: len(names)]
            used[launch.host] += len(names)
            by_name = dict(zip(names, mine, strict=True))
            self._workers[launch.role.name].append(_Worker(launch.host, address, by_name))

    def ports(self, role: str, rank: int) -> tuple[object, ...]:
        """Return the worker's own ports, in the order of its Templates.ports."""
        return tuple(self._workers[role][rank].ports.values())

    def hosts(self, role: str) -> list[tuple[str, str, tuple[object, ...]]]:
        """Return names and addresses of the role's hosts, each with the ports of the role's first worker there."""
        by_host = {worker.host: worker for worker in reversed(self._workers[role])}
        names = dict.fromkeys(worker.host for worker in self._workers[role])
        return [(name, by_host[name].address, tuple(by_host[name].ports.values())) for name in names]

    def value(self, text: str) -> str:
        """Return the value of a place, `gen:0:http` or `gen:all:host_ip`."""
        name, rank, part = text.split(":")
        workers = self._workers[name]
        chosen = workers if rank == EVERY else [workers[int(rank)]]
        return ",".join(self._part(worker, part) for worker in chosen)

    def _part(self, worker: _Worker, part: str) -> str:
        if part in ADDRESSES:
            return worker.host if part == "host" else worker.address
        address = f"[{worker.address}]" if ":" in worker.address else worker.address
        return f"{address}:{worker.ports[part]}"

    def variables(self) -> dict[str, str]:
        """Return HVLAUNCH_ROLE_GEN_HOSTS and HVLAUNCH_ROLE_GEN_HTTP, the addresses of a role's workers by rank."""
        texts: dict[str, str] = {}
        for name, workers in self._workers.items():
            prefix = f"HVLAUNCH_ROLE_{_capitals(name)}"
            texts[f"{prefix}_HOSTS"] = ",".join(worker.address for worker in workers)
            for port in workers[0].ports:
                texts[f"{prefix}_{_capitals(port)}"] = self.value(f"{name}:{EVERY}:{port}")
        return texts


def _capitals(name: str) -> str:
    return name.replace("-", "_").upper()
