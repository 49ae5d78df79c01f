"""Who of the next round gets which place. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker
from hvlaunch.hosts.placement import Launch, seats

__all__ = ["Plan", "by_host", "hand_over", "in_order", "seated"]


class Plan(NamedTuple):
    """The next round, which waits until its hosts have found each other."""

    hosts: list[PoolHost]
    """In order of rank."""
    launches: Sequence[Launch]
    """Likewise."""
    unreached: set[str]
    """Those that have not said yet where they reach the rendezvous."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hosts."""
        return tuple(host.name for host in self.hosts)

    @property
    def facts(self) -> dict[str, HostFacts]:
        """Of the hosts, by name."""
        return {host.name: host.facts for host in self.hosts if host.facts is not None}

    @classmethod
    def of(cls, hosts: Iterable[PoolHost], launches: Sequence[Launch]) -> "Plan":
        """A round on those of the hosts that the launches are on."""
        names = {launch.host for launch in launches}
        used = [host for host in hosts if host.name in names]
        return cls(used, launches, {host.name for host in used if not host.has_tried_rendezvous})


def by_host(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    """The launches of each host, in their order."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        found.setdefault(launch.host, []).append(launch)
    return found


def in_order(hosts: Iterable[PoolHost], current: Round | None) -> list[PoolHost]:
    """The hosts: those of the last round first, in their order; then as given."""
    before = {name: index for index, name in enumerate(current.hosts)} if current is not None else {}
    return sorted(hosts, key=lambda host: before.get(host.name, len(before)))


def hand_over(new: list[Worker], leaving: list[Worker]) -> list[Worker]:
    """Workers that are to leave, but have what the new ones need: the one with the newest commit goes first."""
    if not leaving:
        return new
    newest = max(leaving, key=lambda worker: worker.commit)
    return [newest, *new, *(worker for worker in leaving if worker is not newest)]


def _seniority(worker: Worker) -> tuple[bool, int]:
    return (False, worker.rank) if worker.has_state else (True, worker.slot)


def seated(hosts: Sequence[PoolHost], chosen: Sequence[Worker]) -> tuple[list[PoolHost], list[Launch]]:
    """The hosts in use and who sits where on them, in order of rank.

    Hosts with survivors come first, else in the order given; so do survivors on each host, in the order of their
    ranks, and then the others slot by slot. So rank 0 is the oldest survivor, if there is one.
    """
    on: dict[str, list[Worker]] = {}
    for worker in sorted(chosen, key=_seniority):
        on.setdefault(worker.host, []).append(worker)
    used = [host for host in hosts if host.name in on]
    used.sort(key=lambda host: not any(worker.has_state for worker in on[host.name]))
    starts = {worker.seat: worker.start for worker in chosen}
    places = seats((host.name, [worker.slot for worker in on[host.name]]) for host in used)
    return used, [Launch(seat[1], starts[seat], place) for seat, place in places.items()]
