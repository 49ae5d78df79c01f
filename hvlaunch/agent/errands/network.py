"""Looks at the network of this host: RDMA adapters and interfaces, from /sys and without tools, and times to other hosts."""

from __future__ import annotations

import os
import time

from hvlaunch.agent.facts import interface_networks
from hvlaunch.agent.wire.frames import (
    PORT,
    address,
    flag,
    mapping,
    number,
    of,
    or_null,
    record,
    several,
    text,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Mapping, Optional

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "FABRIC", "RESULT", "chosen_variables", "read_fabric", "run"]

_LONGEST, _MOST = 64, 256
_NAME = text(_LONGEST)


def _network(value: Any) -> bool:
    """An address with the length of its prefix."""
    words = value.split("/") if type(value) is str else []
    # The driver makes networks of them: nothing else may come.
    return len(words) == 2 and address(words[0]) and words[1] in _LENGTHS[":" in words[0]]  # noqa: PLR2004 (both parts)


_LENGTHS = {False: [str(length) for length in range(33)], True: [str(length) for length in range(129)]}
FABRIC = record(
    {
        "adapters": several(
            record(
                {
                    "name": _NAME,
                    "kind": _NAME,  # of node: CA, RNIC (iWARP), unspecified, ...
                    "pci": _NAME,  # address of the device; empty for one of software
                    "numa": whole(-1, 4096),
                    "is_open": flag,  # this user may use it
                    "ports": several(
                        record(
                            {
                                "number": whole(0, _MOST),
                                "state": _NAME,  # ACTIVE, INIT, DOWN, ...
                                "link": _NAME,  # InfiniBand, Ethernet, Unspecified
                                "rate": number(0, 1e6),  # Gbit/s
                                "lid": whole(0, 1 << 32),
                                "sm_lid": whole(0, 1 << 32),
                                "gids": several(
                                    record(
                                        {
                                            "index": whole(0, 1 << 16),
                                            "gid": address,
                                            "kind": _NAME,  # IB/RoCE v1, RoCE v2
                                            "interface": _NAME,
                                        }
                                    ),
                                    _MOST,
                                ),
                            }
                        ),
                        16,
                    ),
                }
            ),
            _MOST,
        ),
        "interfaces": several(
            record(
                {
                    "name": _NAME,
                    "kind": of(
                        "bond",
                        "bridge",
                        "ethernet",
                        "infiniband",
                        "loopback",
                        "tunnel",
                        "virtual",
                        "vlan",
                        "wireless",
                    ),
                    "is_up": flag,
                    "mtu": whole(0, 1 << 32),
                    "speed": or_null(number(0, 1e6)),  # Gbit/s; null if unknown
                    "pci": _NAME,
                    "addresses": several(_network, _MOST),  # 10.0.0.1/24
                }
            ),
            1024,
        ),
        "variables": several(text(256), 1024),  # those that choose a network, set on the host itself
    }
)
_MOST_HOSTS = 1024
ARGUMENTS = record(
    {
        "fabric": flag,
        "nvlink": flag,
        "times": mapping(text(1024), record({"addresses": several(address, 64), "port": PORT}), _MOST_HOSTS),
    },
    optional=("fabric", "nvlink", "times"),
)
RESULT = record(
    {
        "fabric": or_null(FABRIC),
        "nvlink": or_null(text(256)),  # the clusters that its GPUs are in
        "times": mapping(text(1024), number(0, 3600), _MOST_HOSTS),
    },
)

_TRIES = 5
_MEASURING = 10.0  # seconds for the times to all hosts
_PATIENCE = 1.0  # seconds for a connection


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:  # noqa: ARG001 (every errand has it)
    """Read and measure, as the arguments ask."""
    fabric = nvlink = None
    if arguments.get("fabric"):
        fabric = read_fabric("", interface_networks())
        fabric["variables"] = chosen_variables(os.environ)
    if arguments.get("nvlink"):
        nvlink = _nvlink()
    end = time.monotonic() + _MEASURING
    times = {host: _time_to(end=end, **target) for host, target in arguments.get("times", {}).items()}
    return {
        "fabric": fabric,
        "nvlink": nvlink,
        "times": {host: seconds for host, seconds in times.items() if seconds is not None},
    }


def _nvlink() -> Optional[str]:
    from hvlaunch.agent.errands.observer.nvml import Library, NoGpus  # noqa: PLC0415 (few jobs ask, and ctypes takes time)

    try:
        return ",".join(Library().clusters())[:256] or None
    except NoGpus:
        return None


def _time_to(addresses: List[str], port: int, end: float) -> Optional[float]:
    """Return the shortest time of a few connections to a host, by the first address with an answer."""
    import socket  # noqa: PLC0415 (other errands need FABRIC, and the import takes milliseconds)

    here = {network.partition("/")[0] for networks in interface_networks().values() for network in networks}
    for target in addresses:
        # Every host has docker0's address, and answers itself there.
        if target in here or time.monotonic() > end:
            continue
        best: Optional[float] = None
        for _ in range(_TRIES):
            began = time.perf_counter()
            try:
                socket.create_connection((target, port), _PATIENCE).close()
            except OSError:
                break
            took = time.perf_counter() - began
            best = took if best is None else min(best, took)
        if best is not None:
            return best
    return None


_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
_LOOPBACK, _INFINIBAND = 772, 32
_TUNNELS = (65534, 512, 768, 769, 776, 778, 823)  # if_arp.h: none, ppp, tunnel, tunnel6, sit, ipgre, ip6gre
_TUNNEL_TYPES = ("wireguard", "vxlan", "geneve", "gre", "ppp", "wwan")


def read_fabric(root: str, addresses: Mapping[str, List[str]]) -> Dict[str, Any]:
    """Return the adapters and interfaces of the host whose /sys is below `root`.

    `addresses` has the addresses of each interface, with the lengths of their prefixes.
    """
    adapters = [_adapter(root, name) for name in _names(root + "/sys/class/infiniband")[:_MOST]]
    # IPoIB interfaces have no speed of their own in older kernels.
    rates = {
        adapter["pci"]: max((port["rate"] for port in adapter["ports"]), default=0.0)
        for adapter in adapters
        if adapter["pci"]
    }
    interfaces = [
        _interface(root, name, addresses.get(name, []), rates)
        for name in _names(root + "/sys/class/net")
        if os.path.isdir(os.path.join(root + "/sys/class/net", name))
    ]
    return {"adapters": adapters, "interfaces": interfaces[:1024], "variables": []}


def chosen_variables(env: Mapping[str, str], files: Any = _FILES) -> List[str]:
    """Return the names of variables for the choice of a network, set on this host in the environment or in a file of NCCL's."""
    names = {name for name in env if name.startswith(_VARIABLES)}
    for file in [env.get("NCCL_CONF_FILE") or files[1], files[0]]:
        lines = _read_lines(os.path.expanduser(file))
        names.update(line.partition("=")[0].strip() for line in lines if line.startswith("NCCL_"))
    return sorted(name[:256] for name in names if name.isprintable())[:1024]


def _names(folder: str) -> List[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.isprintable() and len(name) < _LONGEST)
    except OSError:
        return []


def _read(*path: str) -> str:
    try:
        with open(os.path.join(*path), errors="replace") as file:
            words = file.read(4096).strip()
    # An entry without a value fails to be read, such as a GID's type.
    except OSError:
        return ""
    return words if words.isprintable() else words.partition("\n")[0]


def _whole(words: str) -> int:
    try:
        return int(words, 0)
    except ValueError:
        return 0


def _pci(folder: str) -> str:
    """Return the PCI address of a device; empty for one of software."""
    name = os.path.basename(os.path.realpath(os.path.join(folder, "device")))
    return name if name.count(":") == 2 and len(name) < _LONGEST else ""  # noqa: PLR2004 (0000:3b:00.0)


def _word(words: str) -> str:
    """Return the word of `4: ACTIVE`."""
    return words.rpartition(":")[2].strip()[:_LONGEST]


def _adapter(root: str, name: str) -> Dict[str, Any]:
    folder = os.path.join(root + "/sys/class/infiniband", name)
    numa = _read(folder, "device", "numa_node")
    return {
        "name": name,
        "kind": _word(_read(folder, "node_type")),
        "pci": _pci(folder),
        "numa": int(numa) if numa.isdigit() else -1,
        "is_open": _is_open(root, name),
        "ports": [_port(os.path.join(folder, "ports"), number) for number in _names(folder + "/ports")[:16]],
    }


def _is_open(root: str, name: str) -> bool:
    """True if this user may open the adapter. A container may show adapters without a right to use them."""
    folder = root + "/sys/class/infiniband_verbs"
    devices = [verbs for verbs in _names(folder) if _read(folder, verbs, "ibdev") == name]
    return any(os.access(root + "/dev/infiniband/" + device, os.R_OK | os.W_OK) for device in devices)


def _port(folder: str, number: str) -> Dict[str, Any]:
    port = os.path.join(folder, number)
    rate = _read(port, "rate").split(" ")[0]  # 100 Gb/sec (4X EDR)
    return {
        "number": _whole(number) & 0xFF,
        "state": _word(_read(port, "state")),
        "link": _read(port, "link_layer")[:_LONGEST],
        "rate": min(float(rate), 1e6) if rate.replace(".", "", 1).isdigit() else 0.0,
        "lid": _whole(_read(port, "lid")),
        "sm_lid": _whole(_read(port, "sm_lid")),
        "gids": list(_gids(port))[:_MOST],
    }


def _gids(port: str) -> Iterator[Dict[str, Any]]:
    """Yield the GIDs in use."""
    for index in sorted(_names(port + "/gids"), key=_whole):
        gid = _read(port, "gids", index)
        # The empty ones are all 0, or have a prefix alone.
        if address(gid) and any(group.strip("0") for group in gid.split(":")[4:]):
            yield {
                "index": _whole(index) & 0xFFFF,
                "gid": gid,
                "kind": _read(port, "gid_attrs", "types", index)[:_LONGEST],
                "interface": _read(port, "gid_attrs", "ndevs", index)[:_LONGEST],
            }


def _interface(root: str, name: str, addresses: List[str], rates: Mapping[str, float]) -> Dict[str, Any]:
    folder = os.path.join(root + "/sys/class/net", name)
    pci, kind, speed = _pci(folder), _kind(folder), _read(folder, "speed")
    gigabits: Optional[float] = min(int(speed) / 1000, 1e6) if speed.isdigit() else None
    # The kernel makes up a speed for interfaces of software.
    if kind in ("bridge", "loopback", "tunnel", "virtual") or gigabits == 0:
        gigabits = None
    if kind == "infiniband" and gigabits is None:
        gigabits = rates.get(pci) or None
    state = _read(folder, "operstate")
    return {
        "name": name,
        "kind": kind,
        # Some drivers never say more than `unknown`, which then means up.
        "is_up": state in ("up", "unknown"),
        "mtu": _whole(_read(folder, "mtu")) & 0xFFFFFFFF,
        "speed": gigabits,
        "pci": pci,
        "addresses": addresses[:_MOST],
    }


def _kind(folder: str) -> str:
    number = _whole(_read(folder, "type"))
    kind = next((word[8:] for word in _read_lines(folder, "uevent") if word.startswith("DEVTYPE=")), "")
    if number == _LOOPBACK:
        return "loopback"
    if number in _TUNNELS or kind in _TUNNEL_TYPES or os.path.exists(folder + "/tun_flags"):
        return "tunnel"
    if kind in ("wlan", "wifi") or os.path.isdir(folder + "/wireless"):
        return "wireless"
    if os.path.isdir(folder + "/bonding") or kind == "bond":
        return "bond"
    if os.path.isdir(folder + "/bridge") or kind == "bridge":
        return "bridge"
    if kind == "vlan":
        return "vlan"
    if number == _INFINIBAND:
        return "infiniband"
    return "ethernet" if os.path.exists(folder + "/device") else "virtual"


def _read_lines(*path: str) -> List[str]:
    try:
        with open(os.path.join(*path), errors="replace") as file:
            return file.read(1 << 16).splitlines()
    except OSError:
        return []
