"""Facts about this host: its name, Python and kernel, its processors and memory, its addresses, and the packages of a Python."""

from __future__ import annotations

import os
import sys
import time

from hvlaunch.agent.quick import socket, struct
from hvlaunch.agent.wire.frames import LONGEST_TEXT, MOST_ADDRESSES, or_null, plain, record, several, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Tuple

__all__ = [
    "PACKAGES",
    "boot_id",
    "free_port",
    "host_facts",
    "interface_addresses",
    "interface_networks",
    "packages_of",
]

_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_DEPRECATED_OR_TENTATIVE = 0x20 | 0x40
_HEADER_SIZE, _ATTRIBUTE_SIZE = 16, 4
_LOWEST_PORT = 20000
_ID_DIGITS = 32


def host_facts() -> Dict[str, Any]:
    """Return the facts of the `hello` frame. Sizes are bytes, `clock` is seconds since the epoch."""
    return {
        "hostname": plain(socket.gethostname(), 256),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": plain(sys.executable, LONGEST_TEXT),
        "kernel": plain(os.uname().release, 256),
        "boot_id": boot_id(),
        "machine_id": _machine_id(),
        # Not cpu_count(): a container or a scheduler may grant fewer processors than the machine has.
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "addresses": interface_addresses(),
        "clock": time.time(),
    }


def boot_id() -> Optional[str]:
    """Return the kernel's name for its current boot; None if unknown."""
    return _read("/proc/sys/kernel/random/boot_id")


def _machine_id() -> Optional[str]:
    """Return the machine's id of machine-id(5); None in a container without one, and before the first boot."""
    text = _read("/etc/machine-id")
    return text if text and len(text) == _ID_DIGITS and not text.strip("0123456789abcdef") else None


def _read(path: str) -> Optional[str]:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def interface_addresses() -> Dict[str, List[str]]:
    """Return at most MOST_ADDRESSES addresses by interface, IPv4 and IPv6, in the kernel's order; from rtnetlink(7)."""
    return {
        name: list(dict.fromkeys(network.partition("/")[0] for network in networks))
        for name, networks in interface_networks().items()
    }


def interface_networks() -> Dict[str, List[str]]:
    """Return the same addresses with the lengths of their prefixes: `10.0.0.1/24`."""
    names = {index: plain(name, 64) for index, name in socket.if_nameindex()[:MOST_ADDRESSES]}
    networks: Dict[str, List[str]] = {name: [] for name in names.values()}
    for number, (index, network) in enumerate(_netlink_addresses()):
        if number < MOST_ADDRESSES and index in names and network not in networks[names[index]]:
            networks[names[index]].append(network)
    return networks


def _netlink_addresses() -> Iterator[Tuple[int, str]]:
    # Netlink and not getifaddrs(), which Python has not, nor ioctl(SIOCGIFCONF), which knows no IPv6.
    request = struct.pack("=IHHIIBxxxi", 24, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0, socket.AF_UNSPEC, 0)
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    try:
        netlink.send(request)
        while True:
            data = netlink.recv(1 << 16)
            start = 0
            while start + _HEADER_SIZE <= len(data):
                size, kind = struct.unpack_from("=IH", data, start)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or size < _HEADER_SIZE:
                    return
                if kind == _RTM_NEWADDR:
                    address = _address_of(data[start + _HEADER_SIZE : start + size])
                    if address is not None:
                        yield address
                start += (size + 3) & ~3
    finally:
        netlink.close()


def _address_of(message: bytes) -> Optional[Tuple[int, str]]:
    """Return interface index and address with prefix of an RTM_NEWADDR message; None for an address that can't be used."""
    family, length, flags, _, index = struct.unpack_from("=BBBBI", message)
    if family not in (socket.AF_INET, socket.AF_INET6) or flags & _IFA_F_DEPRECATED_OR_TENTATIVE:
        return None
    attributes = {}
    start = 8
    while start + _ATTRIBUTE_SIZE <= len(message):
        size, kind = struct.unpack_from("=HH", message, start)
        if size < _ATTRIBUTE_SIZE:
            break
        attributes[kind] = message[start + _ATTRIBUTE_SIZE : start + size]
        start += (size + 3) & ~3
    # On a point-to-point link IFA_ADDRESS is the other end, and IFA_LOCAL is this host.
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    return None if raw is None else (index, "%s/%d" % (socket.inet_ntop(family, raw), length))


def free_port(within: Optional[Tuple[int, int]] = None) -> socket.socket:
    """Return a socket bound to a free port, to be closed just before the port is used.

    `within` are the lowest and the highest permitted port. Raises OSError if no port is free.
    """
    if within is not None:
        return _free_port_within(*within)
    # Outside of the kernel's range for outgoing connections, if it leaves room: a connection could take the port.
    low, high = 32768, 60999
    text = _read("/proc/sys/net/ipv4/ip_local_port_range")
    if text:
        low, high = (int(word) for word in text.split())
    first, last = max((_LOWEST_PORT, low - 1), (high + 1, 65535), key=lambda span: span[1] - span[0])
    for _ in range(64 if last > first else 0):
        reserved = _bind(first + int.from_bytes(os.urandom(4), "big") % (last - first + 1))
        if reserved is not None:
            return reserved
    reserved = _bind(0)
    if reserved is None:
        raise OSError("no free port")
    return reserved


def _free_port_within(low: int, high: int) -> socket.socket:
    """Try each port once."""
    # From a random port on, so that agents of several jobs seldom try the same port.
    count = high - low + 1
    first = int.from_bytes(os.urandom(4), "big")
    for index in range(count):
        reserved = _bind(low + (first + index) % count)
        if reserved is not None:
            return reserved
    raise OSError("no free port")


def _bind(port: int) -> Optional[socket.socket]:
    """Return a socket bound to the port for IPv6 and IPv4, as far as the host has them; None if the port is taken."""
    try:
        both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        both = None
    if both is not None:
        try:
            both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            both.bind(("::", port))
        except OSError:
            both.close()
        else:
            return both
    # A kernel without IPv6, or with IPV6_V6ONLY fixed.
    only = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        only.bind(("", port))
    except OSError:
        only.close()
        return None
    return only


_MOST_EDITABLE, _LONGEST_PATH = 64, 4096
_MOST_BYTES = 1 << 16  # of a file of site-packages
PACKAGES = record(
    {"hvlaunch": or_null(text(64)), "editable": several(text(_LONGEST_PATH, raw=True), _MOST_EDITABLE)}
)


def packages_of(program: str) -> Dict[str, Any]:
    """Return the version of hvlaunch, and the source directories of editable installs. `program` is the file of a Python."""
    version: Optional[str] = None
    editable: List[str] = []
    for directory in _directories(os.path.abspath(program)):
        for name in _listed(directory):
            if name.startswith("hvlaunch-") and name.endswith(".dist-info"):
                version = version or name[len("hvlaunch-") : -len(".dist-info")][:64]
            elif name.endswith((".pth", "_finder.py")):
                editable.extend(_sources(os.path.join(directory, name)))
    for source in editable:
        # The metadata of an editable install has the version of its first day.
        for line in _lines(os.path.join(source, "hvlaunch", "__init__.py")):
            if line.startswith("__version__ = "):
                version = line.partition('"')[2].rstrip('"')[:64]
    short = [source for source in dict.fromkeys(editable) if len(source) <= _LONGEST_PATH]
    return {"hvlaunch": version, "editable": short[:_MOST_EDITABLE]}


def _directories(file: str) -> Iterator[str]:
    """Yield the directories of packages of the Python with this file."""
    real = os.path.realpath(file)
    prefix = os.path.dirname(os.path.dirname(file))
    is_virtual = os.path.exists(os.path.join(prefix, "pyvenv.cfg"))
    prefixes = [prefix]
    if not is_virtual:
        prefix = os.path.dirname(os.path.dirname(real))
        prefixes = [prefix, os.path.join(prefix, "local"), os.path.expanduser("~/.local")]
    for prefix in prefixes:
        lib = os.path.join(prefix, "lib")
        names = [name for name in _listed(lib) if name.startswith("python3")]
        # /usr has several; python3 is Debian's common directory.
        named = [name for name in names if name in (os.path.basename(real), "python3")]
        for name in named or names:
            yield os.path.join(lib, name, "site-packages")
            yield os.path.join(lib, name, "dist-packages")


def _listed(directory: str) -> List[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _lines(file: str) -> List[str]:
    try:
        with open(file, errors="replace") as opened:
            return opened.read(_MOST_BYTES).splitlines()
    except (OSError, ValueError):
        return []


def _sources(file: str) -> List[str]:
    """Return the directories that a .pth file, or an import hook of setuptools, adds."""
    lines = _lines(file)
    if file.endswith(".pth"):
        return [line for line in lines if line.startswith("/")]
    # A line of Python: the hook has a dict of packages and their paths.
    mappings = [line for line in lines if line.startswith("MAPPING")]
    return [os.path.dirname(part) for line in mappings for part in line.split("'") if part.startswith("/")]
