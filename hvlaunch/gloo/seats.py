"""The places of workers that are there: like those of slots, but that some slots may be left out. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hvlaunch.hosts.placement import Placement, place

__all__ = ["Seat", "seats"]

Seat = tuple[str, int]
"""A host and a slot there."""


def seats(hosts: Iterable[tuple[str, Sequence[int]]]) -> dict[Seat, Placement]:
    """The places of workers in these slots, ranks in the order given: host by host, and slot by slot on each.

    local_rank counts a host's slots upwards, whatever their ranks, so that on a full host it is the slot.
    """
    chosen = [(host, slots) for host, slots in hosts if slots]
    if not chosen:
        return {}
    by_local_rank = {
        (one.host, one.local_rank): one for one in place([(host, len(slots)) for host, slots in chosen])
    }
    found: dict[Seat, Placement] = {}
    for host, slots in chosen:
        local_ranks = {slot: local_rank for local_rank, slot in enumerate(sorted(slots))}
        for slot in slots:
            found[host, slot] = replace(by_local_rank[host, local_ranks[slot]], rank=len(found))
    return found
