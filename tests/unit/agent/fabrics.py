"""Hosts' networks as short lines, and the trees of /sys that the kernel would show for them.

An interface is `NAME [GBIT] [KIND] [down] [pci=..] ADDRESS/LENGTH ...`, and a port `DEVICE LINK GBIT [STATE] [key=value ...]`:

    ens3np0 400 11.0.0.72/16 pci=3b
    mlx5_0 Ethernet 400 net=ens3np0 pci=3b
    mlx5_1 InfiniBand 200 prefix=fe80:0000:0000:0001 sm=3 pci=5e

As in the kernel, a port of Ethernet has two GIDs (`v1`, `v2`, or those of `gids=`) for each address of its interfaces,
and for the link's own.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["addresses_of", "write_tree"]

_KINDS = {
    "bridge": "bridge",
    "bond": "bond",
    "vlan": "vlan",
    "vxlan": "vxlan",
    "wireguard": "wireguard",
    "wlan": "wlan",
}
_TYPES = {"loopback": 772, "infiniband": 32, "tunnel": 65534, "wireguard": 65534}
_IN_SOFTWARE = {"bridge", "bond", "vlan", "vxlan", "virtual", "tunnel", "wireguard", "loopback"}
_VERSIONS = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}


def addresses_of(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the addresses with the lengths of their prefixes, by interface."""
    return {words[0]: [word for word in words[1:] if "/" in word] for words in map(str.split, lines)}


def write_tree(root: Path, interfaces: Sequence[str], ports: Sequence[str]) -> None:
    """Write the files of /sys and /dev that hvlaunch reads."""
    for line in interfaces:
        _write_interface(root, line.split())
    for index, line in enumerate(ports):
        _write_port(root, index, line.split(), addresses_of(interfaces))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _options(words: Sequence[str]) -> Mapping[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)


def _device(root: Path, folder: Path, bus: str) -> None:
    """Link a folder of a class to its PCI device."""
    device = root / "sys/devices" / f"0000:{bus}:00.0"
    device.mkdir(parents=True, exist_ok=True)
    (device / "numa_node").write_text("1\n" if bus > "7f" else "0\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device").symlink_to(device)


def _write_interface(root: Path, words: Sequence[str]) -> None:
    name, *more = words
    folder = root / "sys/class/net" / name
    kind = next((word for word in more if word in _KINDS or word in _TYPES or word == "virtual"), "ethernet")
    speed = next((word for word in more if word.replace(".", "").isdigit()), None)
    _write(folder / "type", str(_TYPES.get(kind, 1)))
    _write(folder / "operstate", "down" if "down" in more else "unknown" if kind in _TYPES else "up")
    _write(folder / "mtu", "1500")
    _write(
        folder / "uevent",
        f"DEVTYPE={_KINDS[kind]}\nINTERFACE={name}" if kind in _KINDS else f"INTERFACE={name}",
    )
    _write(folder / "speed", "-1" if speed is None else str(round(float(speed) * 1000)))
    if kind not in _IN_SOFTWARE:
        _device(root, folder, _options(more).get("pci", "01"))


def _write_port(root: Path, index: int, words: Sequence[str], addresses: Mapping[str, Sequence[str]]) -> None:
    name, link, rate, *more = words
    device, _, number = name.partition(":")
    options = _options(more)
    folder = root / "sys/class/infiniband" / device
    if not folder.exists():
        _write(folder / "node_type", options.get("kind", "1: CA"))
        if "pci" in options:
            _device(root, folder, options["pci"])
        _write(root / f"sys/class/infiniband_verbs/uverbs{index}/ibdev", device)
        if options.get("open") != "no":
            _write(root / f"dev/infiniband/uverbs{index}", "")
    port = folder / "ports" / (number or "1")
    state = next((word for word in more if word.isupper()), "ACTIVE")
    _write(port / "state", f"{ {'DOWN': 1, 'INIT': 2, 'ACTIVE': 4}[state] }: {state}")
    _write(port / "link_layer", link)
    _write(port / "rate", f"{rate} Gb/sec (4X EDR)")
    _write(port / "lid", "0x1f" if link == "InfiniBand" else "0x0")
    _write(port / "sm_lid", hex(int(options.get("sm", "1"))) if link == "InfiniBand" else "0x0")
    _write(port / "gids/250", ":".join(["0000"] * 8))
    gids = [(gid, "IB/RoCE v1", "") for gid in [_gid(options.get("prefix", "fe80:0000:0000:0000"), index)]]
    if link == "Ethernet":
        gids = list(_roce_gids(options, addresses, index))
    for position, (gid, kind, interface) in enumerate(gids):
        _write(port / f"gids/{position}", gid)
        _write(port / f"gid_attrs/types/{position}", kind)
        if interface:
            _write(port / f"gid_attrs/ndevs/{position}", interface)


def _gid(prefix: str, index: int) -> str:
    return f"{prefix}:a288:c2ff:fe5b:{index + 1:04x}"


def _roce_gids(
    options: Mapping[str, str], addresses: Mapping[str, Sequence[str]], index: int
) -> Iterator[tuple[str, str, str]]:
    for interface in filter(None, options.get("net", "").split(",")):
        gids = [_gid("fe80:0000:0000:0000", index)]
        for word in addresses.get(interface, ()):
            address = ipaddress.ip_interface(word).ip
            # The kernel's form for IPv4 is ::ffff:10.0.0.1.
            mapped = f"::ffff:{address}" if address.version == 4 else str(address)
            gids.append(ipaddress.IPv6Address(mapped).exploded)
        for gid in gids:
            for version in options.get("gids", "v1,v2").split(","):
                yield gid, _VERSIONS[version], interface
