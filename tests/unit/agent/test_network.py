"""The network of a host, as the kernel shows it: adapters, interfaces, times and streams."""

import socket
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent import facts
from hvlaunch.agent.errands.network import FABRIC, chosen_variables, read_fabric
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.fabrics import addresses_of, write_tree
from tests.unit.agent.harness import interpreter

INTERFACES = [
    "eth0 1 10.0.0.1/24 pci=01",
    "ens3np0 400 down 11.0.0.72/16 fd00::72/64 pci=3b",
    "ib0 infiniband 10.9.0.1/24 pci=5e",
    "docker0 bridge 172.17.0.1/16",
    "wg0 wireguard 10.8.0.1/24",
    "bond0 50 bond 10.7.0.1/24",
    "lo loopback 127.0.0.1/8",
]
PORTS = [
    "mlx5_0 Ethernet 400 net=ens3np0 pci=3b",
    "mlx5_1 InfiniBand 200 INIT prefix=fe80:0000:0000:0001 sm=3 pci=5e open=no",
    "rxe0 Ethernet 2.5",
]


@pytest.fixture
def fabric(tmp_path: Path) -> dict[str, Any]:
    write_tree(tmp_path, INTERFACES, PORTS)
    fabric = read_fabric(str(tmp_path), addresses_of(INTERFACES))
    assert FABRIC(fabric)
    return fabric


def test_ports_have_state_rate_and_gids(fabric: dict[str, Any]) -> None:
    roce, infiniband, software = fabric["adapters"]
    assert (roce["pci"], roce["numa"], roce["kind"], roce["is_open"]) == ("0000:3b:00.0", 0, "CA", True)
    port = roce["ports"][0]
    assert (port["state"], port["link"], port["rate"]) == ("ACTIVE", "Ethernet", 400)
    assert [(gid["gid"][-9:], gid["kind"], gid["interface"]) for gid in port["gids"]] == [
        ("fe5b:0001", "IB/RoCE v1", "ens3np0"),
        ("fe5b:0001", "RoCE v2", "ens3np0"),
        ("0b00:0048", "IB/RoCE v1", "ens3np0"),
        ("0b00:0048", "RoCE v2", "ens3np0"),
        ("0000:0072", "IB/RoCE v1", "ens3np0"),
        ("0000:0072", "RoCE v2", "ens3np0"),
    ]
    assert not infiniband["is_open"]
    assert (infiniband["ports"][0]["state"], infiniband["ports"][0]["sm_lid"]) == ("INIT", 3)
    assert [gid["gid"] for gid in infiniband["ports"][0]["gids"]] == [
        "fe80:0000:0000:0001:a288:c2ff:fe5b:0002"
    ]
    assert (software["pci"], software["ports"][0]["rate"], software["ports"][0]["gids"]) == ("", 2.5, [])


def test_interfaces_have_kind_and_speed(fabric: dict[str, Any]) -> None:
    kinds = {item["name"]: (item["kind"], item["is_up"], item["speed"]) for item in fabric["interfaces"]}
    assert kinds == {
        "bond0": ("bond", True, 50),
        "docker0": ("bridge", True, None),
        "ens3np0": ("ethernet", False, 400),
        "eth0": ("ethernet", True, 1),
        "ib0": ("infiniband", True, 200),
        "lo": ("loopback", True, None),
        "wg0": ("tunnel", True, None),
    }
    assert fabric["interfaces"][2]["addresses"] == ["11.0.0.72/16", "fd00::72/64"]


def test_a_host_without_sysfs_has_no_hardware(tmp_path: Path) -> None:
    assert read_fabric(str(tmp_path), {}) == {"adapters": [], "interfaces": [], "variables": []}


def test_strange_files_do_not_break_the_form(tmp_path: Path) -> None:
    write_tree(tmp_path, INTERFACES, PORTS)
    for file in [*tmp_path.glob("sys/class/*/*/*"), *tmp_path.glob("sys/class/infiniband/*/ports/1/*")]:
        if file.is_file():
            file.write_bytes(b"-9\xff\n\x1b[31m" + b"9" * 5000)
    assert FABRIC(read_fabric(str(tmp_path), addresses_of(INTERFACES)))


def test_variables_of_the_host_and_of_nccl_files(tmp_path: Path) -> None:
    user, system = tmp_path / "user", tmp_path / "system"
    user.write_text("# mine\nNCCL_IB_HCA=mlx5_0\n")
    system.write_text("NCCL_SOCKET_IFNAME = eth1\nOTHER=1\n")
    env = {"GLOO_SOCKET_IFNAME": "eth0", "PATH": "/bin"}
    names = chosen_variables(env, [str(system), str(user)])
    assert names == ["GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"]
    assert chosen_variables({"NCCL_CONF_FILE": str(user)}, [str(system), "/none"]) == [
        "NCCL_CONF_FILE",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
    ]


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_the_errand_reads_its_host(launch: Any, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    rig = ErrandRig(agent)
    result = rig.result(rig.errands.start("network", {"fabric": True}))
    addresses = {item["name"]: item["addresses"] for item in result["fabric"]["interfaces"]}
    assert addresses == {name: facts.interface_networks()[name] for name in addresses}
    assert addresses["lo"][0] == "127.0.0.1/8"
    assert result["nvlink"] is None


def test_times_leave_out_addresses_that_every_host_has(agent: Any) -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        targets = {
            "near": {"addresses": ["127.0.0.1", "127.0.0.2"], "port": port},
            "gone": {"addresses": ["127.0.0.3"], "port": port},
        }
        rig = ErrandRig(agent)
        times = rig.result(rig.errands.start("network", {"times": targets}))["times"]
    # 127.0.0.1 is this machine's own.
    assert times.keys() == {"near"}
    assert 0 < times["near"] < 1
