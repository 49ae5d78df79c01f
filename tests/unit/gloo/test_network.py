"""The choice of addresses: candidates, their order, and the result."""

import pytest

from hvlaunch.engine.hosts import Network, candidates, interface_of
from tests.unit.gloo.history import facts

MANY = {
    "lo": ("127.0.0.1", "::1"),
    "ib0": ("10.1.0.1",),
    "eth0": ("10.0.0.1", "fd00::1", "fe80::1"),
    "docker0": ("172.17.0.1",),
}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("10.0.0.1", ("10.0.0.1", "10.1.0.1", "172.17.0.1", "fd00::1")),
        ("fd00::1", ("fd00::1", "10.1.0.1", "10.0.0.1", "172.17.0.1")),
        ("203.0.113.7", ("10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1", "203.0.113.7")),
        ("127.0.0.1", ("10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1")),
        (None, ("10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1")),
    ],
    ids=[
        "what ssh uses is first",
        "IPv6 too",
        "behind NAT is last",
        "a tunnel's end is nobody's",
        "the driver's machine",
    ],
)
def test_candidates(peer: str | None, expected: tuple[str, ...]) -> None:
    assert candidates(facts(1, addresses=MANY, peer_address=peer)) == expected


def test_interfaces_are_found_by_address() -> None:
    assert interface_of(facts(1, addresses=MANY), "10.1.0.1") == "ib0"
    assert interface_of(facts(1, addresses=MANY), "10.9.9.9") is None


def test_the_loopback_device_is_not_named_for_another_address() -> None:
    """A routing host may have its own address on the loopback device; libraries would use 127.0.0.1 of that device."""
    addresses = {"lo": ("127.0.0.1", "10.9.0.1"), "eth0": ("10.0.0.1",)}
    assert interface_of(facts(1, addresses=addresses), "10.9.0.1") is None
    assert interface_of(facts(1, addresses=addresses), "127.0.0.1") == "lo"
    both = {**addresses, "eth0": ("10.9.0.1",)}
    assert interface_of(facts(1, addresses=both), "10.9.0.1") == "eth0"


def network(*numbers: int, only: tuple[str, ...] = ()) -> Network:
    return Network({"abcd"[number - 1]: facts(number) for number in numbers}, only)


def test_every_host_probes_the_first_and_its_neighbour() -> None:
    assert sorted((host, target) for host, target, _ in network(1, 2, 3, 4).tries()) == [
        ("a", "b"),
        ("b", "a"),
        ("b", "c"),
        ("c", "a"),
        ("c", "d"),
        ("d", "a"),
    ]


def test_the_chosen_address_is_reachable_for_every_host() -> None:
    net = network(1, 2, 3)
    for host, target, addresses in net.tries():
        assert not net.is_enough
        for address in addresses:
            net.add(host, target, address)
    assert net.is_enough
    assert net.is_best
    assert net.problem() is None
    assert [net.address(host) for host in "abc"] == ["10.0.0.1"] * 3
    assert [net.interface(host) for host in "abc"] == ["eth0"] * 3


def test_an_unreachable_interface_is_not_chosen() -> None:
    """The interface eth0 of b comes first, but leads nowhere; docker0 has the same address on both hosts."""
    dead = {"eth0": ("192.168.9.2",), "eth1": ("10.0.0.2",), "docker0": ("172.17.0.1",)}
    good = {"eth5": ("10.0.0.1",), "docker0": ("172.17.0.1",)}
    net = Network({"a": facts(1, addresses=good), "b": facts(2, addresses=dead, peer_address=None)})
    net.add("b", "a", "10.0.0.1")
    net.add("a", "b", "10.0.0.2")
    assert not net.is_best
    for host, target in (("a", "b"), ("b", "a")):
        net.add(host, target, None)
    assert net.is_best
    assert net.problem() is None
    assert (net.address("b"), net.interface("a"), net.interface("b")) == ("10.0.0.1", "eth5", "eth1")


def test_ipv6_only() -> None:
    six = {"eth0": ("fd00::1", "fe80::1")}
    net = Network({"a": facts(1, addresses=six, peer_address="fd00::1"), "b": facts(2)})
    assert ("b", "a", ("fd00::1",)) in list(net.tries())


def test_a_pair_without_a_path_is_named() -> None:
    net = network(1, 2)
    net.add("b", "a", "10.0.0.1")
    net.add("a", "b", None)
    problem = net.problem()
    assert problem is not None
    assert problem.kind == "Unreachable"
    assert (problem.host, problem.other, list(problem.addresses)) == ("a", "b", ["10.0.0.2"])


def test_a_host_with_loopback_alone() -> None:
    net = Network({"a": facts(1), "b": facts(2, addresses={"lo": ("127.0.0.1",)}, peer_address=None)})
    net.add("a", "b", None)
    net.add("b", "a", "10.0.0.1")
    assert "none: it has only loopback addresses" in str(net.problem())


def test_a_single_host_uses_its_loopback() -> None:
    net = network(1)
    assert list(net.tries()) == []
    assert net.is_best
    assert (net.address("a"), net.interface("a")) == ("127.0.0.1", "lo")
    assert network(1, only=("eth0",)).address("a") == "10.0.0.1"
