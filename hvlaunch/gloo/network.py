"""Which addresses and interfaces the workers use: who tries whom, what they find, the choice. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvlaunch.errors import BadUsage, HvlaunchError, Unreachable
from hvlaunch.gloo.events import HostFacts

__all__ = ["LOOPBACK", "Network", "candidates", "interface_of"]

LOOPBACK = "127.0.0.1"


def candidates(facts: HostFacts) -> list[str]:
    """Addresses under which other hosts may reach this one, the likeliest first.

    First the one that the driver used, if the host really has it: an address that only leads to
    the host (by NAT, say) comes last, since the host itself must be able to use it too.
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
    import ipaddress  # noqa: PLC0415 (a job on one host needs none of this)

    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def interface_of(facts: HostFacts, address: str) -> str | None:
    """The host's interface that has the address."""
    return next((name for name, listed in facts.addresses.items() if address in listed), None)


@dataclass(slots=True)
class _Target:
    """A host that others try: its addresses in order of preference, and who got through to which."""

    addresses: Sequence[str]
    found: dict[str, set[str]]
    """By the host that tries."""
    trying: set[str] = field(default_factory=set)

    def common(self) -> str | None:
        """The best address that all who try got through to so far."""
        return next((one for one in self.addresses if all(one in got for got in self.found.values())), None)

    def best_for(self, host: str) -> str | None:
        return next((one for one in self.addresses if one in self.found[host]), None)

    @property
    def is_best(self) -> bool:
        """Whether waiting longer can't give a better common address."""
        return not self.trying or (bool(self.addresses) and self.common() == self.addresses[0])


class Network:
    """The hosts of a round, in order of rank, and the ways between them.

    All others try the first host, which has rank 0; each tries the next one, in a ring without the
    last step. A connection counts where the right host answers. `only` are interfaces that the user
    named: they are taken as they are, and nothing is tried. One host alone needs nobody, and uses its
    loopback.
    """

    def __init__(self, facts: Mapping[str, HostFacts], only: Sequence[str] = ()) -> None:
        self._facts = facts
        self._only = only
        self.first, *others = facts
        self._targets: dict[str, _Target] = {}
        if others and not only:
            previous = dict(zip(others, [self.first, *others], strict=False))
            for target in facts:
                hosts = others if target == self.first else [previous[target]]
                tried = candidates(facts[target])
                self._targets[target] = _Target(tried, {host: set() for host in hosts}, set(hosts))

    def tries(self) -> Iterator[tuple[str, str, Sequence[str]]]:
        """Who is to try whom, at which addresses."""
        for name, target in self._targets.items():
            for host in target.found:
                yield host, name, target.addresses

    def add(self, host: str, target: str, address: str | None) -> None:
        """`host` got through to `target` at the address; None: it has tried all."""
        if address is None:
            self._targets[target].trying.discard(host)
        else:
            self._targets[target].found[host].add(address)

    @property
    def is_best(self) -> bool:
        """Whether waiting longer can't give a better choice."""
        return all(target.is_best for target in self._targets.values())

    @property
    def is_enough(self) -> bool:
        """Whether every host can be reached by all who are to reach it, though perhaps not in the best way."""
        return all(target.common() is not None for target in self._targets.values())

    def problem(self) -> HvlaunchError | None:
        """Why the hosts can't work together, when nothing more will be found: the first pair, or interface."""
        for name, target in self._targets.items():
            for host, found in target.found.items():
                if not found:
                    return _unreachable(host, name, target.addresses)
        for name, facts in self._facts.items():
            if self._only and self._named(facts) is None:
                has = ", ".join(facts.addresses)
                hint = "--network-interfaces with a name of each host's, where they differ"
                cause = f"none of the interfaces {', '.join(self._only)} has an address there (it has {has})"
                return BadUsage(cause, host=name, hint=hint)
        return None

    def _named(self, facts: HostFacts) -> str | None:
        """The first of the user's interfaces that has an address on the host."""
        return next((name for name in self._only if facts.addresses.get(name)), None)

    def address(self, host: str, target: str | None = None) -> str:
        """At which address `host` reaches `target`, by default rank 0's host; once there is no problem()."""
        target = target or self.first
        named = self._named(self._facts[target])
        if named is not None:
            return self._facts[target].addresses[named][0]
        if target not in self._targets:
            return LOOPBACK
        tried = self._targets[target]
        own = tried.best_for(host) if host in tried.found else None
        return tried.common() or own or tried.addresses[0]

    def interface(self, host: str) -> str | None:
        """The host's own interface that the others reach it by."""
        facts = self._facts[host]
        if self._only:
            return self._named(facts)
        others = iter(self._targets[host].found) if host in self._targets else iter([host])
        return interface_of(facts, self.address(next(others), host))


def _unreachable(host: str, target: str, addresses: Sequence[str]) -> Unreachable:
    tried = ", ".join(addresses) or "it has no address but loopback"
    return Unreachable(
        f"can't connect to host {target} (tried {tried})",
        host=host,
        other=target,
        addresses=addresses,
        hint="opening the firewall between the two, or --network-interfaces, which takes addresses without trying",
    )
