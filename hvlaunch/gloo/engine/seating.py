"""Who of the next round gets which place. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hvlaunch.gloo.engine.pool import PoolHost
from hvlaunch.gloo.engine.workers import Worker
from hvlaunch.hosts.placement import Placement, Seat, seats

__all__ = ["Plan", "hand_over", "seated"]


class Plan(NamedTuple):
    """The next round, which waits until its hosts have found each other."""

    hosts: list[PoolHost]
    """In order of rank."""
    places: Mapping[Seat, Placement]
    unreached: set[str]
    """Those that have not said yet where they reach the rendezvous."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hosts."""
        return tuple(host.name for host in self.hosts)

    @classmethod
    def of(cls, hosts: Iterable[PoolHost], places: Mapping[Seat, Placement]) -> "Plan":
        """A round on those of the hosts that the places are on."""
        names = dict.fromkeys(host for host, _ in places)
        used = [host for host in hosts if host.name in names]
        return cls(used, places, {host.name for host in used if not host.has_tried_rendezvous})


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
