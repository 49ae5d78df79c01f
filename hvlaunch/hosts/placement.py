"""Placement: which host gets which ranks, and how many slots a host has."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hvlaunch.errors import BadUsage, NotEnoughSlots, SlotsUnlikely
from hvlaunch.job import ElasticOptions, Host, MapPolicy
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Launch",
    "Placement",
    "RolePlace",
    "Seat",
    "in_quota",
    "needed",
    "place",
    "seats",
    "slots_of",
    "suspects_last",
    "unlikely",
    "with_slots",
]

# Most slots of a host with an unknown number of processors.
_MOST = 1024
# Slots that are never refused: a small machine may have many small workers.
_LEAST = 64
_PER_PROCESSOR = 8
_LOWEST_PORT = 1024  # of an unprivileged user; a smaller number is hardly a port

Seat = tuple[str, int]
"""A host and a slot on it."""


class Placement(NamedTuple):
    """One worker's place in a round. Ranks count from 0; docs/internals/glossary.md, says what they mean."""

    host: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int
    group_rank: int
    """Index of the host among the used hosts."""
    group_size: int
    """Number of used hosts."""


class RolePlace(NamedTuple):
    """A worker's place among the workers of its role."""

    number: int
    """Index of the role among those of the job."""
    name: str
    place: Placement

    @property
    def label(self) -> str:
        """Name and rank, as in messages: `gen:1`."""
        return f"{self.name}:{self.place.rank}"


class Launch(NamedTuple):
    """A worker in a slot of its place's host; the slot had `start` workers before."""

    slot: int
    start: int
    place: Placement
    role: RolePlace | None = None
    """None in jobs without roles."""

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def seat(self) -> Seat:
        return self.place.host, self.slot


def place(
    slots: Sequence[tuple[str, int]], np: int | None = None, map_by: MapPolicy = "slot"
) -> list[Placement]:
    """Place `np` workers by rank, host by host in the given order, or by turns.

    `slots` has each host once, with its number of slots; np None means a worker in every slot. Raises NotEnoughSlots, and
    BadUsage for np below 1. cross_rank and cross_size are Horovod's: they count hosts with a worker of this local_rank.
    """
    _check(np)
    available = sum(count for _, count in slots)
    size = available if np is None else np
    if size > available:
        raise NotEnoughSlots(size, available)
    # Hosts without workers do not count in cross, group and host ranks.
    used = _shares(slots, size, map_by)
    cross_sizes = Counter(local_rank for _, count in used for local_rank in range(count))
    cross_ranks: Counter[int] = Counter()
    placements: list[Placement] = []
    for group_rank, (host, local_size) in enumerate(used):
        for local_rank in range(local_size):
            placements.append(
                Placement(
                    host=host,
                    rank=len(placements),
                    local_rank=local_rank,
                    cross_rank=cross_ranks[local_rank],
                    size=size,
                    local_size=local_size,
                    cross_size=cross_sizes[local_rank],
                    group_rank=group_rank,
                    group_size=len(used),
                )
            )
            cross_ranks[local_rank] += 1
    # Ranks count host by host up to here; by node they go around the hosts.
    if map_by == "slot":
        return placements
    placements.sort(key=lambda placement: (placement.local_rank, placement.group_rank))
    return [placement._replace(rank=rank) for rank, placement in enumerate(placements)]


def slots_of(host: Host, slots_per_host: int | None, gpus: int) -> int:
    """Return the host's slots: its own, else --slots-per-host, else its number of GPUs, else 1."""
    return host.slots or slots_per_host or max(gpus, 1)


def unlikely(host: str, slots: int, cpus: int | None = None) -> SlotsUnlikely | None:
    """Return the error for improbable slots of a host with so many processors; None for probable ones."""
    if slots <= (_MOST if cpus is None else max(_LEAST, _PER_PROCESSOR * cpus)):
        return None
    noun = "processor" if cpus == 1 else "processors"
    cause = (
        f"{slots} slots are more than any host has" if cpus is None else f"{slots} slots, but {cpus} {noun}"
    )
    # `host:2222` is a common slip: the number after the colon is slots, not sshd's port.
    as_port = f"-p {slots} if that is the port of sshd, " if slots > _LOWEST_PORT else ""
    return SlotsUnlikely(cause, host=host, hint=f"{as_port}--force-slots if you mean that many workers")


def needed(
    hosts: Sequence[Host], np: int | None, slots_per_host: int | None = None, map_by: MapPolicy = "slot"
) -> list[Host]:
    """Return the first hosts that `np` workers may need; every host for np None.

    A host whose slots only its agent can count counts as a slot. Raises NotEnoughSlots if known slots are too few, BadUsage
    for np below 1.
    """
    _check(np)
    if np is None:
        return list(hosts)
    least = 0
    for index, host in enumerate(hosts, 1):
        least += slots_of(host, slots_per_host, gpus=0)
        # Hosts behind these are not even connected.
        if least >= np:
            return list(hosts[: index if map_by == "slot" else np])
    if slots_per_host or all(host.slots for host in hosts):
        raise NotEnoughSlots(np, least)
    return list(hosts)


def _check(np: int | None) -> None:
    if np is not None and np < 1:
        raise BadUsage(f"-np {np}: must be at least 1")


def _shares(slots: Sequence[tuple[str, int]], size: int, map_by: MapPolicy = "slot") -> list[tuple[str, int]]:
    """Return the used hosts and their numbers of workers, at most a worker in each slot."""
    taken = [0] * len(slots)
    # A pass fills each host by slot, or gives each host a worker by node.
    while size > 0 and any(count > has for (_, count), has in zip(slots, taken, strict=True)):
        for index, (_, count) in enumerate(slots):
            added = min(count - taken[index], size, 1 if map_by == "node" else size)
            taken[index] += added
            size -= added
    return [(host, count) for (host, _), count in zip(slots, taken, strict=True) if count]


def seats(hosts: Iterable[tuple[str, Sequence[int]]]) -> dict[Seat, Placement]:
    """Return the placements of workers in these slots, with ranks in the given order: host by host, slot by slot.

    local_rank counts a host's used slots upwards, whatever their ranks; on a full host it equals the slot.
    """
    chosen = [(host, slots) for host, slots in hosts if slots]
    if not chosen:
        return {}
    by_local_rank = {
        (placement.host, placement.local_rank): placement
        for placement in place([(host, len(slots)) for host, slots in chosen])
    }
    placements: dict[Seat, Placement] = {}
    for host, slots in chosen:
        local_ranks = {slot: local_rank for local_rank, slot in enumerate(sorted(slots))}
        for slot in slots:
            placements[host, slot] = by_local_rank[host, local_ranks[slot]]._replace(rank=len(placements))
    return placements


def with_slots(hosts: Sequence[Host], count: int, option: str) -> list[Host]:
    """Return the hosts with `count` slots each. Raises BadUsage, naming `option`, if a host has fewer."""
    for host in hosts:
        if host.slots is not None and count > host.slots:
            noun = "slot" if host.slots == 1 else "slots"
            raise BadUsage(f"{option}: host {host.name} has only {host.slots} {noun}")
    return [replace(host, slots=count) for host in hosts]


def suspects_last(hosts: Iterable[Host], avoided: Sequence[str]) -> list[Host]:
    """Return the hosts in their order, and the avoided ones behind the others, in the order of `avoided`."""
    places = {name: place for place, name in enumerate(avoided, 1)}
    return sorted(hosts, key=lambda host: places.get(host.name, 0))


def in_quota(hosts: Sequence[Host], options: ElasticOptions) -> list[Host]:
    """Return the hosts that an elastic job may use now, with their slots. Raises BadUsage."""
    used = suspects_last(hosts, options.avoided)[: options.most_hosts]
    if options.per_host is None:
        return used
    # 0 is a worker on each GPU, and only the host's agent can count them.
    if options.per_host == 0:
        return [replace(host, slots=None) for host in used]
    return with_slots(used, options.per_host, f"--nproc-per-node {options.per_host}")
