"""The network hardware of hosts, the order of hosts in which neighbours are near, and the choice of adapters. Pure.

NCCL and Gloo get variables for each host, with the reasons. In doubt a variable stays unset: NCCL then chooses as without
hvlaunch. An adapter is chosen only with proof of a path to the other hosts: an address in their reach, or an InfiniBand subnet
with the same manager.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_interface, ip_network
from math import inf
from typing import Any, TypeAlias

from hvlaunch.engine.hosts import SOCKETS, Network, is_usable
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "AdapterChoice",
    "Fabric",
    "Gid",
    "Interface",
    "Port",
    "Trial",
    "Way",
    "choose",
    "common_ways",
    "fabric_of",
    "near_first",
    "needs_trial",
]


class Gid(NamedTuple):
    """An address of an RDMA port."""

    gid: str
    kind: str
    """`IB/RoCE v1` or `RoCE v2`."""
    interface: str


class Port(NamedTuple):
    """A port of an RDMA adapter."""

    device: str
    number: int
    kind: str
    """Kind of its adapter: CA, RNIC for iWARP, or another word of the kernel."""
    is_active: bool
    is_open: bool
    """True if workers may use the adapter."""
    link: str
    """InfiniBand, Ethernet, or Unspecified."""
    rate: float
    """Gbit/s."""
    subnet: str
    """Prefix and manager of an InfiniBand subnet."""
    pci: str
    gids: tuple[Gid, ...]

    @property
    def name(self) -> str:
        """The port as NCCL_IB_HCA has it."""
        return f"{self.device}:{self.number}"


class Interface(NamedTuple):
    """An interface of the kernel."""

    name: str
    kind: str
    """See `kind` of agent/errands/network.py."""
    is_up: bool
    speed: float | None
    """Gbit/s; None if unknown."""
    addresses: tuple[str, ...]
    """With the lengths of their prefixes."""


class Trial(NamedTuple):
    """The speed of a short stream from another host."""

    address: str
    """Receiver's address."""
    sender: str
    """Sender's address."""
    rate: float
    """Bytes per second; 0 if the stream did not arrive."""


class Fabric(NamedTuple):
    """The network hardware of a host, and measurements with other hosts."""

    ports: tuple[Port, ...] = ()
    """In the order of their PCI addresses."""
    interfaces: tuple[Interface, ...] = ()
    variables: tuple[str, ...] = ()
    """Names of variables about networks that are set on the host itself."""
    nvlink: str = ""
    """Names of its GPUs' NVLink clusters."""
    trials: tuple[Trial, ...] = ()
    times: Mapping[str, float] = {}
    """Seconds for a connection to other hosts, by name."""


def fabric_of(text: str) -> Fabric:
    """Return the fabric of a host by its survey: JSON with the words of its agent (agent/errands/network.py) and the trials."""
    # As text in the facts: jobs without a survey need none of these classes.
    result = json.loads(text)
    fabric = result["fabric"] or {"adapters": (), "interfaces": (), "variables": ()}
    ports = [_port(adapter, port) for adapter in fabric["adapters"] for port in adapter["ports"]]
    interfaces = tuple(
        Interface(
            item["name"],
            item["kind"],
            item["is_up"],
            None if item["speed"] is None else float(item["speed"]),
            tuple(item["addresses"]),
        )
        for item in fabric["interfaces"]
    )
    return Fabric(
        # NCCL numbers adapters in about this order.
        tuple(sorted(ports, key=lambda port: (not port.pci, port.pci))),
        interfaces,
        tuple(fabric["variables"]),
        nvlink=result["nvlink"] or "",
        trials=tuple(Trial(address, sender, float(rate)) for address, sender, rate in result["trials"]),
        times={host: float(seconds) for host, seconds in result["times"].items()},
    )


def _port(adapter: Mapping[str, Any], port: Mapping[str, Any]) -> Port:
    gids = tuple(Gid(gid["gid"], gid["kind"], gid["interface"]) for gid in port["gids"])
    prefix = gids[0].gid.rpartition(":")[0][:19] if gids else ""
    return Port(
        adapter["name"],
        port["number"],
        adapter["kind"],
        port["state"] == "ACTIVE",
        adapter["is_open"],
        port["link"],
        float(port["rate"]),
        # Separate subnets often have the same prefix, but each has a manager.
        f"{prefix} of manager {port['sm_lid']}" if port["link"] == "InfiniBand" else "",
        adapter["pci"],
        gids,
    )


# The order of hosts

_RATIO, _DIFFERENCE = 1.3, 20e-6
"""Ratio and seconds between the times of two levels, such as within a rack and beyond; less is noise."""
_MOST_MEASURED = 128
"""Most hosts to group by times: the work grows with the cube of their number."""


def near_first(hosts: Sequence[str], fabrics: Mapping[str, Fabric]) -> list[str]:
    """Return the hosts with near hosts side by side.

    Groups are formed by the networks of the RDMA ports, then by times between hosts, from far to near, then by NVLink
    cluster. Groups and the hosts in each stay in the given order, and the first host stays first. Hosts without data about
    a level form a group together.
    """
    levels: list[Mapping[str, object]] = [
        {name: _networks(fabric) for name, fabric in fabrics.items()},
        *_levels_by_time(hosts, fabrics),
        {name: fabric.nvlink for name, fabric in fabrics.items()},
    ]
    order = list(hosts)
    # Near before far: a group of a far level then has its near groups side by side.
    for level in reversed(levels):
        groups: dict[object, list[str]] = {}
        for name in order:
            groups.setdefault(level.get(name) or None, []).append(name)
        order = [name for members in groups.values() for name in members]
    return order


def _networks(fabric: Fabric) -> frozenset[str]:
    """Return the InfiniBand subnets and IP networks of the active RDMA ports."""
    from ipaddress import ip_interface  # noqa: PLC0415 (few jobs need it)

    ports = [port for port in fabric.ports if port.is_active]
    names = {gid.interface for port in ports for gid in port.gids}
    addresses = [word for item in fabric.interfaces if item.name in names for word in item.addresses]
    networks = {
        str(interface.network) for interface in map(ip_interface, addresses) if not interface.is_link_local
    }
    return frozenset(networks | {port.subnet for port in ports if port.subnet})


def _levels_by_time(hosts: Sequence[str], fabrics: Mapping[str, Fabric]) -> list[Mapping[str, object]]:
    """Return groups of hosts by their times to each other, from far to near: clusters by average linkage.

    A level ends where the next two clusters are clearly farther from each other than all before.
    """
    times = {
        frozenset((host, other)): seconds
        for host in hosts
        if host in fabrics
        for other, seconds in fabrics[host].times.items()
        if other != host
    }
    if len(hosts) > _MOST_MEASURED or not times:
        return []
    clusters: dict[int, list[str]] = {number: [host] for number, host in enumerate(hosts)}
    # By two numbers of clusters: sum and count of the known times between their hosts.
    between = {
        (number, other): (times[pair], 1)
        for number, host in enumerate(hosts)
        for other in range(number + 1, len(hosts))
        if (pair := frozenset((host, hosts[other]))) in times
    }
    levels: list[Mapping[str, object]] = []
    last = inf
    while between:
        nearest = min(between, key=lambda pair: between[pair][0] / between[pair][1])
        total, count = between.pop(nearest)
        seconds = total / count
        if seconds >= last * _RATIO and seconds >= last + _DIFFERENCE:
            levels.append({host: (number,) for number, members in clusters.items() for host in members})
        last = seconds
        first, second = nearest
        clusters[first] += clusters.pop(second)
        for ends in [ends for ends in between if second in ends]:
            total, count = between.pop(ends)
            other = ends[0] if ends[1] == second else ends[1]
            joined = (min(first, other), max(first, other))
            before = between.get(joined, (0.0, 0))
            between[joined] = before[0] + total, before[1] + count
    return levels[::-1]


_RDMA_OF_THE_USER = ("NCCL_IB_", "NCCL_NET")
_MOST_PORTS = 32
"""Most ports in NCCL_IB_HCA."""
_KINDS = ("bond", "bridge", "ethernet", "infiniband", "virtual", "vlan")
"""Kinds of interfaces for a choice of hvlaunch's own: neither tunnels nor radio."""
_FASTER = 2.0
_FASTER_IN_TRIAL = 1.5
"""Ratios of speeds, by the kernel and in a trial, from which another network replaces the usual one."""
_VERSIONS = {"RoCE v2": "2", "IB/RoCE v1": "1"}
_FAMILIES = {4: "AF_INET", 6: "AF_INET6"}

_Address: TypeAlias = IPv4Address | IPv6Address
_Ports: TypeAlias = dict[str, list[Port]]
"""Ports by host."""


class AdapterChoice(NamedTuple):
    """Variables by host, and the reason for each decision."""

    variables: Mapping[str, Mapping[str, str]]
    reasons: tuple[str, ...] = ()
    is_split: bool = False
    """True if the adapters of the hosts can't work together, so NCCL gets sockets."""


class Way(NamedTuple):
    """An interface of a host in a network, and its address there."""

    interface: Interface
    address: str


def choose(
    fabrics: Mapping[str, Fabric],
    network: Network,
    user: Mapping[str, str],
    *,
    has_interfaces: bool = False,
) -> AdapterChoice:
    """Choose for these hosts. `user` are the job's own variables; `has_interfaces`: the user has named interfaces."""
    taken = set(user).union(*(fabric.variables for fabric in fabrics.values()))
    variables: dict[str, dict[str, str]] = {host: {} for host in fabrics}
    reasons = ["--network-interfaces chooses the interfaces"]
    if not has_interfaces:
        reasons = [_choose_sockets(fabrics, network, variables)]
    rdma = sorted(name for name in taken if name.startswith(_RDMA_OF_THE_USER))
    is_split = False
    if rdma:
        reasons.append(f"the adapters are left to {', '.join(rdma)}")
    else:
        is_split = _Adapters(fabrics, network, variables, reasons).choose()
    for name in sorted(taken.intersection(*variables.values()) if variables else ()):
        reasons.append(f"{name} is set already, and stays")
    kept = {
        host: {name: value for name, value in chosen.items() if name not in taken}
        for host, chosen in variables.items()
    }
    return AdapterChoice(kept, tuple(reasons), is_split)


def _exact(name: str, others: Sequence[str], text: str) -> str:
    """Return `text` for NCCL, which takes names as the beginnings of names."""
    return f"={text}" if any(other != name and other.startswith(name) for other in others) else text


# Interfaces


def common_ways(fabrics: Mapping[str, Fabric]) -> dict[str, dict[str, Way]]:
    """Return the ways of the hosts by network: networks in which each host has an address of its own, IPv4 first."""
    by_network: dict[str, dict[str, Way]] = {}
    for host, fabric in fabrics.items():
        for version in (4, 6):
            for interface in fabric.interfaces:
                # A library that is given a name takes the interface's first address.
                words = [ip_interface(word) for word in interface.addresses]
                first = next((word for word in words if word.version == version), None)
                is_good = interface.is_up and interface.kind in _KINDS
                if first is not None and is_good and is_usable(str(first.ip)):
                    way = Way(interface, str(first.ip))
                    by_network.setdefault(str(first.network), {}).setdefault(host, way)
    ways: dict[str, dict[str, Way]] = {}
    names: set[tuple[str, ...]] = set()
    for network in sorted(by_network, key=lambda network: ":" in network):
        by_host = by_network[network]
        interfaces = tuple(by_host[host].interface.name for host in fabrics if host in by_host)
        # docker0 has the same address everywhere. IPv6 on the same interfaces is no other way.
        is_own = len({way.address for way in by_host.values()}) == len(fabrics)
        if is_own and interfaces not in names:
            names.add(interfaces)
            ways[network] = by_host
    return ways


def _speed(by_host: Mapping[str, Way]) -> float | None:
    """Return the speed of the slowest interface of a network; None if unknown."""
    speeds = [way.interface.speed for way in by_host.values()]
    numbers = [speed for speed in speeds if speed is not None]
    return min(numbers) if len(numbers) == len(speeds) else None


def needs_trial(ways: Mapping[str, Mapping[str, Way]]) -> bool:
    """True if several networks are possible, and the speeds of interfaces do not decide."""
    return len(ways) > 1 and any(_speed(by_host) is None for by_host in ways.values())


def _choose_sockets(
    fabrics: Mapping[str, Fabric], network: Network, variables: Mapping[str, dict[str, str]]
) -> str:
    """Set the interfaces for sockets; return the reason."""
    ways = {
        name: by_host
        for name, by_host in common_ways(fabrics).items()
        if all(way.address in network.proven(host) for host, way in by_host.items())
    }
    usual = next(
        (
            name
            for name, by_host in ways.items()
            if all(way.address == network.own_address(host) for host, way in by_host.items())
        ),
        None,
    )
    chosen, reason = _best(ways, usual, fabrics)
    for host, fabric in fabrics.items():
        name = network.interface(host) if chosen is None else ways[chosen][host].interface.name
        if name is not None:
            variables[host].update(dict.fromkeys(SOCKETS, name))
            names = [interface.name for interface in fabric.interfaces]
            variables[host]["NCCL_SOCKET_IFNAME"] = _exact(name, names, name)
    return reason


def _best(
    ways: Mapping[str, Mapping[str, Way]], usual: str | None, fabrics: Mapping[str, Fabric]
) -> tuple[str | None, str]:
    """Return the network to use, None for the usual interfaces, and the reason."""
    others = [name for name in ways if name != usual]
    if not others:
        return None, "sockets use the interfaces by which the hosts reach each other"
    if usual is None:
        best = max(others, key=lambda name: _speed(ways[name]) or 0.0)
        return (
            best,
            f"sockets use {best}, in reach of all hosts, and no tunnel or route through other networks",
        )
    speed = _speed(ways[usual])
    speeds = {name: _speed(ways[name]) for name in others}
    if speed is not None and all(other is not None for other in speeds.values()):
        best = max(others, key=lambda name: speeds[name] or 0.0)
        if (speeds[best] or 0.0) >= _FASTER * speed:
            return best, f"sockets use {best}: {speeds[best]:g} Gbit/s, and {speed:g} in {usual}"
        return None, f"sockets use {usual}: no other network is clearly faster"
    rates = {name: _rate(ways[name], fabrics) for name in ways}
    best = max(others, key=lambda name: rates[name])
    if rates[usual] and rates[best] >= _FASTER_IN_TRIAL * rates[usual]:
        seen = f"{rates[best] / 1e6:.0f} MB/s in a trial, and {rates[usual] / 1e6:.0f} in {usual}"
        return best, f"sockets use {best}: {seen}"
    return None, f"sockets use {usual}, as usual: no other network is known to be faster"


def _rate(by_host: Mapping[str, Way], fabrics: Mapping[str, Fabric]) -> float:
    """Return the rate of a trial in this network; 0 without one."""
    addresses = {way.address for way in by_host.values()}
    trials = [trial for fabric in fabrics.values() for trial in fabric.trials]
    return max((trial.rate for trial in trials if {trial.address, trial.sender} <= addresses), default=0.0)


# RDMA adapters


class _Adapters:
    """The choice of RDMA ports: sets the hosts' `variables`, and appends to `reasons`."""

    def __init__(
        self,
        fabrics: Mapping[str, Fabric],
        network: Network,
        variables: Mapping[str, dict[str, str]],
        reasons: list[str],
    ) -> None:
        self._fabrics = fabrics
        self._network = network
        self._variables = variables
        self._reasons = reasons
        self._seen = self._ports(lambda port: port.is_active and port.link in ("InfiniBand", "Ethernet"))
        """The ports that NCCL takes by itself."""

    def _ports(self, is_good: Callable[[Port], bool]) -> _Ports:
        return {
            host: [port for port in fabric.ports if is_good(port)] for host, fabric in self._fabrics.items()
        }

    def choose(self) -> bool:
        """Choose; return True if the hosts are split."""
        every = [port for fabric in self._fabrics.values() for port in fabric.ports]
        if any(port.link == "Unspecified" for port in every):
            return self._leave("a plugin has to choose adapters that are neither InfiniBand nor RoCE")
        if not any(self._seen.values()):
            return self._leave(
                "no host has an active InfiniBand or RoCE port" if every else "no host has an RDMA adapter"
            )
        usable = self._ports(_is_usable_port)
        if lacking := [host for host, ports in usable.items() if not ports]:
            if any(port.kind != "CA" for host in lacking for port in self._seen[host]):
                return self._leave(f"host {lacking[0]} has only iWARP")
            if len(lacking) == len(usable):
                return self._leave("no host has an active port with an address, and the right to open it")
            if any(port.is_open for host in lacking for port in self._seen[host]):
                return self._leave(f"host {lacking[0]} has only RoCE ports without an IP address")
            return self._split(
                f"host {lacking[0]} has no usable InfiniBand or RoCE port, and other hosts have"
            )
        infiniband = {
            host: [port for port in ports if port.link == "InfiniBand"] for host, ports in usable.items()
        }
        roce = {host: [port for port in ports if port.link == "Ethernet"] for host, ports in usable.items()}
        options = [
            option for option in (self._infiniband(infiniband), self._roce(roce)) if option is not None
        ]
        if options:
            best = max(options, key=lambda option: min(map(_total, option.ports.values())))
            self._set(best)
            return False
        if not all(infiniband.values()) and not all(roce.values()):
            host = next(host for host, ports in infiniband.items() if not ports)
            other = next(host for host, ports in infiniband.items() if ports)
            return self._split(f"host {other} has InfiniBand, and host {host} has RoCE")
        if all(roce.values()) and (odd := self._other_version(roce)):
            return self._split(f"host {odd} has another version of RoCE than other hosts")
        return self._leave("no adapters are proven to reach each other on all hosts")

    def _leave(self, reason: str) -> bool:
        self._reasons.append(f"NCCL chooses its adapters itself: {reason}")
        return False

    def _split(self, reason: str) -> bool:
        self._reasons.append(f"NCCL uses sockets: {reason}")
        for variables in self._variables.values():
            variables["NCCL_IB_DISABLE"] = "1"
        return True

    def _infiniband(self, ports: _Ports) -> "_Option | None":
        """Return the ports in subnets of all hosts."""
        chosen = _in_common(ports, lambda _, port: port.subnet)
        return None if chosen is None else _Option("InfiniBand", chosen)

    def _roce(self, ports: _Ports) -> "_Option | None":
        """Return the ports with addresses in reach of the other hosts, of the same version and family."""
        for kind, version in _VERSIONS.items():
            for family, word in _FAMILIES.items():
                proven = {
                    host: [port for port in members if self._proven(host, port, kind, family)]
                    for host, members in ports.items()
                }
                label = partial(self._label, kind=kind, family=family)
                chosen = _in_common(proven, label)
                # Without a network of all hosts there are routes between their networks.
                if chosen is None and all(proven.values()):
                    chosen = _fast(proven)
                if chosen is not None:
                    more = {"NCCL_IB_ROCE_VERSION_NUM": version, "NCCL_IB_ADDR_FAMILY": word}
                    ranges = {host: self._range(host, chosen[host], kind, family) for host in chosen}
                    return _Option(f"RoCE v{version}", chosen, more, ranges)
        return None

    def _other_version(self, ports: _Ports) -> str | None:
        """Return a host whose ports in reach have no GID of a version that the first host has."""
        kinds = {
            host: {
                kind
                for kind in _VERSIONS
                for family in _FAMILIES
                for port in members
                if self._proven(host, port, kind, family)
            }
            for host, members in ports.items()
        }
        if not all(kinds.values()):
            return None
        first = next(iter(kinds.values()))
        return next((host for host, others in kinds.items() if not others & first), None)

    def _proven(self, host: str, port: Port, kind: str, family: int) -> list[_Address]:
        """Return the addresses of a port in reach of the other hosts."""
        return [at for at in _addresses(port, kind, family) if str(at) in self._network.proven(host)]

    def _label(self, host: str, port: Port, kind: str, family: int) -> str:
        """Return the IP network of a port."""
        address = self._proven(host, port, kind, family)[0]
        words = [word for item in self._fabrics[host].interfaces for word in item.addresses]
        return next((str(at.network) for at in map(ip_interface, words) if at.ip == address), str(address))

    def _range(self, host: str, ports: Sequence[Port], kind: str, family: int) -> str | None:
        """Return NCCL_IB_ADDR_RANGE if a port has other addresses too; empty if no range tells them apart."""
        good = [address for port in ports for address in self._proven(host, port, kind, family)]
        others = [at for port in ports for at in _addresses(port, kind, family) if at not in good]
        if not others:
            return None
        network = ip_network(self._label(host, ports[0], kind, family))
        while any(address not in network for address in good):
            network = network.supernet()
        return "" if any(address in network for address in others) else str(network)

    def _set(self, option: "_Option") -> None:
        left_out: set[str] = set()
        for host, ports in option.ports.items():
            variables, seen = self._variables[host], self._seen[host]
            variables.update(option.variables)
            others = [port for port in seen if port not in ports]
            left_out.update(port.device for port in others)
            if others and len(ports) <= _MOST_PORTS:
                names = ",".join(port.name for port in ports)
                is_prefix = any(other.device.startswith(port.device) for port in ports for other in others)
                variables["NCCL_IB_HCA"] = f"={names}" if is_prefix else names
            if addresses := option.ranges.get(host):
                variables["NCCL_IB_ADDR_RANGE"] = addresses
        rate = min(map(_total, option.ports.values()))
        without = f", without {', '.join(sorted(left_out))}" if left_out else ", by all active ports"
        self._reasons.append(
            f"NCCL uses {option.kind} with {rate:g} Gbit/s{without}: these ports reach each other on all hosts"
        )
        if "" in option.ranges.values():
            self._reasons.append("NCCL_IB_ADDR_RANGE stays unset: no range has the good addresses alone")


class _Option(NamedTuple):
    """Ports for all hosts, and variables besides NCCL_IB_HCA."""

    kind: str
    ports: _Ports
    variables: Mapping[str, str] = {}
    ranges: Mapping[str, str | None] = {}


def _total(ports: Sequence[Port]) -> float:
    return sum(port.rate for port in ports)


def _is_usable_port(port: Port) -> bool:
    has_address = port.link == "InfiniBand" or any(
        _addresses(port, kind, family) for kind in _VERSIONS for family in _FAMILIES
    )
    return port.is_active and port.is_open and port.kind == "CA" and has_address


def _addresses(port: Port, kind: str, family: int) -> list[_Address]:
    """Return the IP addresses of a RoCE port, of a version and a family; no link-local ones."""
    addresses: list[_Address] = []
    for gid in port.gids:
        address = IPv6Address(gid.gid)
        plain = address.ipv4_mapped or address
        if (
            gid.kind == kind
            and plain.version == family
            and not plain.is_link_local
            and plain not in addresses
        ):
            addresses.append(plain)
    return addresses


def _fast(ports: _Ports) -> _Ports:
    """Leave out ports with less than half of the rate of the host's fastest: they serve storage or management."""
    fastest = {host: max((port.rate for port in members), default=0.0) for host, members in ports.items()}
    return {
        host: [port for port in members if 2 * port.rate >= fastest[host]] for host, members in ports.items()
    }


def _in_common(ports: _Ports, label: Callable[[str, Port], str]) -> _Ports | None:
    """Return the fast ports in networks that every host is in; None without such a network.

    NCCL joins the first adapter of a host with the first of another, and so on. If a host has its networks in another
    order, a single network is used.
    """

    def within(members: _Ports, networks: Collection[str]) -> _Ports:
        return {
            host: [port for port in several if label(host, port) in networks]
            for host, several in members.items()
        }

    def labels(members: _Ports) -> dict[str, list[str]]:
        return {host: [label(host, port) for port in several] for host, several in members.items()}

    common = set.intersection(*map(set, labels(ports).values()))
    if not common:
        return None
    # After the others have gone: a fast port that leads nowhere must not make the good ones look slow.
    ports = within(ports, common)
    common = set.intersection(*map(set, labels(_fast(ports)).values()))
    if common:
        ports = within(_fast(ports), common)
    networks = labels(ports)
    counts = {
        word: min(words.count(word) for words in networks.values())
        for word in set().union(*networks.values())
    }
    # Two ports beside eight are for storage.
    common = {word for word, count in counts.items() if 2 * count >= max(counts.values())}
    orders = {tuple(dict.fromkeys(word for word in words if word in common)) for words in networks.values()}
    if len(orders) > 1:
        first = next(iter(networks.values()))
        common = {min(common, key=lambda word: (-counts[word], first.index(word)))}
    return within(ports, common)
