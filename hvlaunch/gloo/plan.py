"""What the next round is to be. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hvlaunch.gloo.pool import PoolHost
from hvlaunch.gloo.seats import Seat
from hvlaunch.hosts.placement import Placement

__all__ = ["Plan"]


class Plan(NamedTuple):
    """The next round, which waits until its hosts have found each other."""

    hosts: list[PoolHost]
    """In order of rank."""
    places: Mapping[Seat, Placement]
    unreached: set[str]
    """Those that have not said yet where they reach the rendezvous."""

    @classmethod
    def of(cls, hosts: Iterable[PoolHost], places: Mapping[Seat, Placement]) -> "Plan":
        """A round on those of the hosts that the places are on."""
        names = dict.fromkeys(host for host, _ in places)
        used = [host for host in hosts if host.name in names]
        return cls(used, places, {host.name for host in used if not host.has_tried_rendezvous})
