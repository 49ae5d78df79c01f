"""The network hardware of hosts, as data, and the order of hosts in which neighbours are near each other. Pure."""

import json
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

__all__ = ["Fabric", "Gid", "Interface", "Port", "Trial", "fabric_of", "near_first"]


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
    """See `kind` of agent/fabric.py."""
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
    """Return the fabric of a host by its survey: JSON with the words of its agent (agent/fabric.py) and the trials."""
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
