"""Placement: which host gets which ranks, and how many slots a host has."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hvlaunch.errors import BadUsage, NotEnoughSlots, SlotsUnlikely
from hvlaunch.job import ElasticOptions, Host, MapPolicy

__all__ = [
    "Launch",
    "Placement",
    "Seat",
    "in_quota",
    "needed",
    "place",
    "seats",
    "slots_of",
    "unlikely",
    "with_slots",
]

_MOST = 1024  # slots of a host that nothing is known of: more workers than that are on no host
_LEAST = 64  # slots, which are never refused: many small workers on a small machine are no mistake
_PER_PROCESSOR = 8
_LOWEST_PORT = 1024  # that a user may have: a smaller number of slots is hardly a port

Seat = tuple[str, int]
"""A host and a slot there."""


class Placement(NamedTuple):
    """One worker's place in a round. Ranks count from 0; docs/architecture.md, "Words", says what they mean."""

    host: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int
    group_rank: int
    """Index of the host among those in use."""
    group_size: int
    """How many hosts are in use."""


class Launch(NamedTuple):
    """Who sits where: a worker in a slot of its place's host, before which the slot had `start` others."""

    slot: int
    start: int
    place: Placement

    @property
    def host(self) -> str:
        return self.place.host

    @property
    def seat(self) -> Seat:
        return self.place.host, self.slot


def place(
    slots: Sequence[tuple[str, int]], np: int | None = None, map_by: MapPolicy = "slot"
) -> list[Placement]:
    """Give `np` workers their places by rank, host by host in the order given, or by turns.

    `slots` has each host once, with the number of its slots; np None is one worker in every slot.
    Raises NotEnoughSlots where np is more than the slots, BadUsage where it is less than 1. Source of
    cross_rank and cross_size: Horovod, which counts the hosts that have the worker's local_rank.
    """
    _check(np)
    available = sum(count for _, count in slots)
    size = available if np is None else np
    if size > available:
        raise NotEnoughSlots(size, available)
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
    if map_by == "slot":
        return placements
    placements.sort(key=lambda at: (at.local_rank, at.group_rank))
    return [at._replace(rank=rank) for rank, at in enumerate(placements)]


def slots_of(host: Host, slots_per_host: int | None, gpus: int) -> int:
    """The host's slots: its own, else --slots-per-host, else one for each of its `gpus`, else 1."""
    return host.slots or slots_per_host or max(gpus, 1)


def unlikely(host: str, slots: int, cpus: int | None = None) -> SlotsUnlikely | None:
    """What is wrong with so many slots on a host with so many processors; None for a number that may be right."""
    if slots <= (_MOST if cpus is None else max(_LEAST, _PER_PROCESSOR * cpus)):
        return None
    noun = "processor" if cpus == 1 else "processors"
    cause = (
        f"{slots} slots are more than any host has" if cpus is None else f"{slots} slots, but {cpus} {noun}"
    )
    as_port = f"-p {slots} if that is the port of sshd, " if slots > _LOWEST_PORT else ""
    return SlotsUnlikely(cause, host=host, hint=f"{as_port}--force-slots if so many workers are meant")


def needed(
    hosts: Sequence[Host], np: int | None, slots_per_host: int | None = None, map_by: MapPolicy = "slot"
) -> list[Host]:
    """The first hosts, as many as `np` workers may need; all where np is None. The others are not used.

    A host whose slots only its agent can count (its GPUs) is taken for one slot. Raises
    NotEnoughSlots where the slots are known and too few, BadUsage where np is less than 1.
    """
    _check(np)
    if np is None:
        return list(hosts)
    least = 0
    for index, host in enumerate(hosts, 1):
        least += slots_of(host, slots_per_host, gpus=0)
        if least >= np:
            return list(hosts[: index if map_by == "slot" else np])
    if slots_per_host or all(host.slots for host in hosts):
        raise NotEnoughSlots(np, least)
    return list(hosts)


def _check(np: int | None) -> None:
    if np is not None and np < 1:
        raise BadUsage(f"-np {np}: must be at least 1")


def _shares(slots: Sequence[tuple[str, int]], size: int, map_by: MapPolicy = "slot") -> list[tuple[str, int]]:
    """The hosts that `size` workers are on, at most one in each slot, and how many on each."""
    taken = [0] * len(slots)
    while size > 0 and any(count > has for (_, count), has in zip(slots, taken, strict=True)):
        for index, (_, count) in enumerate(slots):
            more = min(count - taken[index], size, 1 if map_by == "node" else size)
            taken[index] += more
            size -= more
    return [(host, count) for (host, _), count in zip(slots, taken, strict=True) if count]


def seats(hosts: Iterable[tuple[str, Sequence[int]]]) -> dict[Seat, Placement]:
    """The places of workers in these slots, ranks in the order given: host by host, and slot by slot on each.

    local_rank counts a host's slots upwards, whatever their ranks, so that on a full host it is the slot.
    """
    chosen = [(host, slots) for host, slots in hosts if slots]
    if not chosen:
        return {}
    by_local_rank = {
        (at.host, at.local_rank): at for at in place([(host, len(slots)) for host, slots in chosen])
    }
    found: dict[Seat, Placement] = {}
    for host, slots in chosen:
        local_ranks = {slot: local_rank for local_rank, slot in enumerate(sorted(slots))}
        for slot in slots:
            found[host, slot] = by_local_rank[host, local_ranks[slot]]._replace(rank=len(found))
    return found


def with_slots(hosts: Sequence[Host], count: int, option: str) -> list[Host]:
    """Each host with so many slots. Raises BadUsage, with the words of `option`, where one is said to have fewer."""
    for host in hosts:
        if host.slots is not None and count > host.slots:
            noun = "slot" if host.slots == 1 else "slots"
            raise BadUsage(f"{option}: host {host.name} has only {host.slots} {noun}")
    return [replace(host, slots=count) for host in hosts]


def in_quota(hosts: Sequence[Host], options: ElasticOptions) -> list[Host]:
    """Those of the hosts of an elastic job that may be used now, with their slots. Raises BadUsage."""
    used = hosts[: options.most_hosts]
    if options.per_host is None:
        return list(used)
    if options.per_host == 0:
        return [replace(host, slots=None) for host in used]
    return with_slots(used, options.per_host, f"--nproc-per-node {options.per_host}")
