"""The choice of adapters on recorded layouts of hosts: layouts/*.toml, each with its source and the right choice.

A layout has hosts (`hosts`, by default a and b), whose interfaces and ports are those of `[each]`, with the host's number
for {n}, or the host's own. An address answers if the asking host is in the same network, or if it is `routed`; one of a
`dead` network never does. ssh comes in at the first interface with an address, or at `via`.
"""

import ipaddress
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from hvlaunch.agent.errands.network import FABRIC, read_fabric
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.fabric import AdapterChoice, Fabric, Trial, choose, common_ways, fabric_of, near_first
from hvlaunch.engine.hosts import Network
from tests.unit.agent.fabrics import addresses_of, write_tree

LAYOUTS = sorted(Path(__file__).with_name("layouts").glob("*.toml"))
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")


class Layout:
    """The hosts of a layout: their facts, as agents read them, and the network, after all probes."""

    def __init__(self, path: Path, root: Path) -> None:
        self.about = tomllib.loads(path.read_text())
        self.hosts = list(self.about.get("hosts", "ab"))
        self.lines = {host: self._lines(host, number) for number, host in enumerate(self.hosts, 1)}
        self.fabrics = {host: self._fabric(host, root / host) for host in self.hosts}
        facts = {host: self._facts(host) for host in self.hosts}
        self.network = Network(facts)
        for host, target, addresses in list(self.network.tries()):
            for address in addresses:
                if self._answers(host, address):
                    self.network.add(host, target, address)
            self.network.add(host, target, None)
        assert self.network.problem() is None

    def _lines(self, host: str, number: int) -> tuple[list[str], list[str]]:
        about = self.about.get(host, self.about.get("each"))
        net, ib = ([line.replace("{n}", str(number)) for line in about.get(key, [])] for key in ("net", "ib"))
        return net, ib

    def _fabric(self, host: str, root: Path) -> Fabric:
        net, ib = self.lines[host]
        write_tree(root, net, ib)
        words = read_fabric(str(root), addresses_of(net))
        words["variables"] = self.about.get("set", {}).get(host, [])
        assert FABRIC(words)
        return fabric_of(json.dumps({"fabric": words, "nvlink": None, "times": {}, "trials": []}))

    def _facts(self, host: str) -> HostFacts:
        addresses = {
            name: tuple(word.partition("/")[0] for word in words)
            for name, words in addresses_of(self.lines[host][0]).items()
        }
        via = self.about.get("via") or next(name for name, listed in addresses.items() if listed)
        return HostFacts(
            addresses=addresses,
            cpus=8,
            gpus=8,
            scratch="/tmp/x",
            beacon_port=1,
            master_port=2,
            peer_address=addresses[via][-1],
        )

    def _answers(self, host: str, address: str) -> bool:
        at = ipaddress.ip_address(address)
        words = [word for listed in addresses_of(self.lines[host][0]).values() for word in listed]
        here = [ipaddress.ip_interface(word) for word in words]
        dead = [ipaddress.ip_network(word) for word in self.about.get("dead", [])]
        routed = [ipaddress.ip_network(word) for word in self.about.get("routed", [])]
        if any(at in net for net in dead) or any(at == interface.ip for interface in here):
            return False
        return any(at in interface.network for interface in here) or any(at in net for net in routed)

    def choice(self) -> AdapterChoice:
        fabrics = dict(self.fabrics)
        first, second = self.hosts[:2]
        ways = common_ways({first: fabrics[first], second: fabrics[second]})
        trials = tuple(
            Trial(ways[net][second].address, ways[net][first].address, rate * 1e6)
            for net, rate in self.about.get("streams", {}).items()
        )
        fabrics[second] = fabrics[second]._replace(trials=trials)
        return choose(fabrics, self.network, self.about.get("user", {}))

    def expected(self, host: str) -> Mapping[str, str]:
        expect: Any = self.about["expect"]
        words = self.about.get("expect-of", {}).get(host) or (
            expect if isinstance(expect, str) else expect[host]
        )
        variables: dict[str, str] = {}
        for name, value in (word.split("=", 1) for word in words.split()):
            variables.update(dict.fromkeys(SOCKETS, value) if name == "sockets" else {name: value})
        return variables


def test_there_are_forty_layouts_and_each_names_its_source() -> None:
    assert len(LAYOUTS) >= 40
    assert all(tomllib.loads(path.read_text())["source"] for path in LAYOUTS)


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_the_choice_is_right(path: Path, tmp_path: Path) -> None:
    layout = Layout(path, tmp_path)
    choice = layout.choice()
    assert choice.variables == {host: layout.expected(host) for host in layout.hosts}, choice.reasons
    assert layout.about.get("because", "") in " | ".join(choice.reasons)
    assert choice.is_split is layout.about.get("is_split", False)


def drawn(dice: random.Random, number: int) -> dict[str, Any]:
    """Return a host with hardware drawn at random, in the form of the agent."""
    networks = [f"10.{dice.randint(0, 2)}.0.{number}/24" for _ in range(4)]
    words = [
        *networks,
        "172.17.0.1/16",
        "fe80::1/64",
        f"fd00:{dice.randint(0, 1)}::{number}/64",
        "127.0.0.1/8",
        "0.0.0.0/0",
    ]
    interfaces: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": dice.choice(["ethernet", "bridge", "tunnel", "vlan", "infiniband", "loopback"]),
            "is_up": dice.random() < 0.8,
            "mtu": 1500,
            "speed": dice.choice([None, 1.0, 10.0, 0.0]),
            "pci": "",
            "addresses": dice.sample(words, dice.randint(0, 3)),
        }
        for name in ("eth0", "eth1", "eth10", "lo")
    ]
    addresses = [word.partition("/")[0] for item in interfaces for word in item["addresses"]]
    gids = ["fe80:0000:0000:0000:a288:c2ff:fe5b:0001", "0000:0000:0000:0000:0000:0000:0000:0001"]
    gids += [ipaddress.IPv6Address(f"::ffff:{at}" if ":" not in at else at).exploded for at in addresses]
    adapters = [
        {
            "name": name,
            "kind": dice.choice(["CA", "CA", "CA", "RNIC", ""]),
            "pci": dice.choice(["", "0000:3b:00.0"]),
            "numa": -1,
            "is_open": dice.random() < 0.9,
            "ports": [
                {
                    "number": port,
                    "state": dice.choice(["ACTIVE", "ACTIVE", "ACTIVE", "DOWN"]),
                    "link": dice.choice(
                        ["Ethernet", "Ethernet", "InfiniBand"] if dice.random() < 0.95 else ["Unspecified"]
                    ),
                    "rate": dice.choice([0, 100, 200, 400]),
                    "lid": 1,
                    "sm_lid": dice.randint(0, 1),
                    "gids": [
                        {
                            "index": index,
                            "gid": gid,
                            "kind": dice.choice(["RoCE v2", "IB/RoCE v1", ""]),
                            "interface": "eth0",
                        }
                        for index, gid in enumerate(dice.sample(gids, dice.randint(0, len(gids))))
                    ],
                }
                for port in range(1, dice.randint(1, 2) + 1)
            ],
        }
        for name in dice.sample(["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"], dice.randint(0, 4))
    ]
    return {
        "adapters": adapters,
        "interfaces": interfaces,
        "variables": dice.choice([[], [], ["NCCL_SOCKET_IFNAME"]]),
    }


@pytest.mark.parametrize("seed", range(3))
def test_any_hardware_leads_to_a_sound_choice(seed: int) -> None:
    dice = random.Random(seed)
    names: set[str] = set()
    for _ in range(300):
        choice = sound_choice(dice)
        names.update(*choice.variables.values())
    # The draws are good for something.
    assert {"NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_ADDR_RANGE", "NCCL_SOCKET_IFNAME"} <= names


def sound_choice(dice: random.Random) -> AdapterChoice:
    """Choose for hosts drawn at random."""
    surveys = {host: drawn(dice, number) for number, host in enumerate("abc"[: dice.randint(2, 3)], 1)}
    assert all(FABRIC(survey) for survey in surveys.values())
    fabrics = {
        host: fabric_of(json.dumps({"fabric": survey, "nvlink": None, "times": {}, "trials": []}))
        for host, survey in surveys.items()
    }
    facts = {
        host: HostFacts(
            addresses={
                item.name: tuple(word.partition("/")[0] for word in item.addresses)
                for item in fabric.interfaces
            },
            cpus=1,
            gpus=None,
            scratch="",
            beacon_port=1,
            master_port=2,
            peer_address="192.0.2.1",
        )
        for host, fabric in fabrics.items()
    }
    network = Network(facts)
    for host, target, addresses in list(network.tries()):
        for address in addresses:
            if address == "192.0.2.1" or dice.random() < 0.8:
                network.add(host, target, address)
    choice = choose(fabrics, network, {"GLOO_SOCKET_IFNAME": "mine"})
    for host, variables in choice.variables.items():
        assert "GLOO_SOCKET_IFNAME" not in variables
        assert not any(" " in value for value in variables.values())
        seen = {port.name for port in fabrics[host].ports if port.is_active and port.is_open}
        assert set(variables.get("NCCL_IB_HCA", "").lstrip("=").split(",")) <= seen | {""}
        assert variables.get("TP_SOCKET_IFNAME", "eth0") in {item.name for item in fabrics[host].interfaces}
        assert not ("NCCL_IB_DISABLE" in variables and "NCCL_IB_HCA" in variables)
    near_first(list(fabrics), fabrics)
    return choice
