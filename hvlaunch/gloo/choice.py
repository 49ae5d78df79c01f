"""Who of the workers that ask gets which place. Pure."""

from collections.abc import Sequence

from hvlaunch.gloo.crew import Worker
from hvlaunch.gloo.pool import PoolHost
from hvlaunch.gloo.seats import Seat, seats
from hvlaunch.hosts.placement import Placement

__all__ = ["hand_over", "seated"]


def hand_over(new: list[Worker], leaving: list[Worker]) -> list[Worker]:
    """Workers that are to leave, but have what the new ones need: the one with the newest commit goes first."""
    if not leaving:
        return new
    newest = max(leaving, key=lambda worker: worker.commit)
    return [newest, *new, *(worker for worker in leaving if worker is not newest)]


def seated(
    hosts: Sequence[PoolHost], chosen: Sequence[Worker]
) -> tuple[list[PoolHost], dict[Seat, Placement]]:
    """The hosts in use and the places on them, in order of rank.

    Hosts with survivors come first, else in the order given, and each host's workers slot by slot; but
    rank 0 is a survivor, if there is one.
    """
    by_host: dict[str, list[Worker]] = {}
    for worker in sorted(chosen, key=lambda worker: worker.slot):
        by_host.setdefault(worker.host, []).append(worker)
    used = [host for host in hosts if host.name in by_host]
    used.sort(key=lambda host: not any(worker.has_state for worker in by_host[host.name]))
    first = by_host[used[0].name]
    survivor = next((worker for worker in first if worker.has_state), first[0])
    if not first[0].has_state:
        first.sort(key=lambda worker: worker is not survivor)
    return used, seats((host.name, [worker.slot for worker in by_host[host.name]]) for host in used)
