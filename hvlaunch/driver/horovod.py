"""What Horovod's workers need of the rendezvous: which scopes a round has, how large, and who may use them."""

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hvlaunch.driver.links.relay import peer_name
from hvlaunch.engine.actions import Start
from hvlaunch.hosts.placement import Placement

if TYPE_CHECKING:
    from hvlaunch.rendezvous.serving.server import RendezvousServer

__all__ = ["addresses", "let_in", "scopes"]


def let_in(starts: Sequence[Start], rendezvous: "RendezvousServer") -> None:
    """The workers of these, which are all of a round, unless they may be at work there already."""
    places = [launch.place for start in starts for launch in start.launches]
    rendezvous.open_to_horovod(scopes(places), addresses(starts), starts[0].round)


def scopes(places: Iterable[Placement]) -> dict[str, int]:
    """The scopes that Horovod's workers meet in, and how many do in each."""
    sizes: dict[str, int] = {}
    for place in places:
        sizes["global"] = place.size
        sizes[f"local_{place.host}"] = place.local_size
        sizes[f"cross_{place.local_rank}"] = place.cross_size
    return sizes


def addresses(starts: Sequence[Start]) -> set[str]:
    """Where the hosts' connections to the rendezvous come from, as the server names it.

    A loopback address is the driver's own machine's there, whichever host it was told by.
    """
    found: set[str] = set()
    for start in starts:
        known = start.facts
        own = {address for listed in known.addresses.values() for address in listed}
        if known.peer_address:
            own.add(known.peer_address.partition("%")[0])
        if known.peer_address is not None:
            own = {address for address in own if not ipaddress.ip_address(address).is_loopback}
        found |= own | {peer_name(start.host)}
    return found
