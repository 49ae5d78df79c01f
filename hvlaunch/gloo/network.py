"""Which addresses and interfaces the workers use: candidates, what the hosts found, the choice. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvlaunch.gloo.events import HostFacts

__all__ = ["LOOPBACK", "Findings", "Route", "candidates", "interface_of"]

LOOPBACK = "127.0.0.1"


def candidates(facts: HostFacts) -> list[str]:
    """Addresses under which other hosts may reach this one, the likeliest first.

    First the one that the driver used, if the host really has it: an address that only leads to
    the host (by NAT, say) comes last, since rank 0 must be able to use it too.
    """
    own = [address for listed in facts.addresses.values() for address in listed if _is_usable(address)]
    own.sort(key=lambda address: ":" in address)
    peer = facts.peer_address
    if peer in own:
        own.remove(peer)
        own.insert(0, peer)
    elif peer is not None and _is_usable(peer):
        own.append(peer)
    return own


def _is_usable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def interface_of(facts: HostFacts, address: str) -> str | None:
    """The host's interface that has the address."""
    return next((name for name, listed in facts.addresses.items() if address in listed), None)


@dataclass(frozen=True, slots=True)
class Route:
    """How a host gets to rank 0's host: the address there, and its own interface."""

    address: str
    interface: str | None


@dataclass(slots=True)
class Findings:
    """What the hosts find when they try rank 0's addresses (in order of preference)."""

    addresses: Sequence[str]
    routes: dict[str, dict[str, Route]]
    """By host, then by address."""
    unfinished: set[str] = field(default_factory=set)
    """Hosts that still try."""

    @classmethod
    def expected(cls, addresses: Sequence[str], hosts: Sequence[str]) -> "Findings":
        return cls(addresses, {host: {} for host in hosts}, set(hosts))

    def add(self, host: str, address: str | None, interface: str | None) -> None:
        """The host got through to the address; None: it has tried all."""
        if address is None:
            self.unfinished.discard(host)
        else:
            self.routes[host][address] = Route(address, interface)

    def common(self) -> str | None:
        """The best address that all hosts got through to so far."""
        return next(
            (one for one in self.addresses if all(one in found for found in self.routes.values())), None
        )

    @property
    def is_best(self) -> bool:
        """Whether waiting longer can't give a better choice."""
        return not self.unfinished or self.common() == self.addresses[0]

    def unreachable_from(self) -> list[str]:
        """Hosts that got through to none of the addresses."""
        return [host for host, found in self.routes.items() if not found]

    def choice(self) -> Mapping[str, Route]:
        """For each host, the address all have in common, else the best of its own."""
        common = self.common()
        return {host: found[common or self._best(found)] for host, found in self.routes.items()}

    def _best(self, found: Mapping[str, Route]) -> str:
        return next(address for address in self.addresses if address in found)
