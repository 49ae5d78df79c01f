"""The choice of addresses: which are tried, in which order, and which is taken."""

import pytest

from hvlaunch.gloo.network import Findings, Route, candidates, interface_of
from tests.unit.gloo.history import facts

MANY = {
    "lo": ["127.0.0.1", "::1"],
    "ib0": ["10.1.0.1"],
    "eth0": ["10.0.0.1", "fd00::1", "fe80::1"],
    "docker0": ["172.17.0.1"],
}


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("10.0.0.1", ["10.0.0.1", "10.1.0.1", "172.17.0.1", "fd00::1"]),
        ("fd00::1", ["fd00::1", "10.1.0.1", "10.0.0.1", "172.17.0.1"]),
        ("203.0.113.7", ["10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1", "203.0.113.7"]),
        ("127.0.0.1", ["10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1"]),
        (None, ["10.1.0.1", "10.0.0.1", "172.17.0.1", "fd00::1"]),
    ],
    ids=[
        "what ssh uses is first",
        "IPv6 too",
        "behind NAT is last",
        "a tunnel's end is nobody's",
        "the driver's machine",
    ],
)
def test_candidates(peer: str | None, expected: list[str]) -> None:
    assert candidates(facts(1, addresses=MANY, peer_address=peer)) == expected


def test_interfaces_are_found_by_address() -> None:
    assert interface_of(facts(1, addresses=MANY), "10.1.0.1") == "ib0"
    assert interface_of(facts(1, addresses=MANY), "10.9.9.9") is None


def test_the_first_address_that_all_reach_is_common() -> None:
    findings = Findings.expected(["x", "y", "z"], ["b", "c"])
    findings.add("b", "y", "eth0")
    findings.add("b", "z", "eth1")
    assert findings.common() is None
    findings.add("c", "z", "eth2")
    assert findings.common() == "z"
    assert not findings.is_best
    findings.add("c", "y", "eth2")
    assert findings.common() == "y"
    findings.add("b", "x", "eth0")
    findings.add("c", "x", "eth0")
    assert findings.is_best
    assert findings.choice() == {"b": Route("x", "eth0"), "c": Route("x", "eth0")}


def test_when_all_have_tried_all_it_gets_no_better() -> None:
    findings = Findings.expected(["x", "y"], ["b"])
    findings.add("b", "y", None)
    assert not findings.is_best
    findings.add("b", None, None)
    assert findings.is_best
    assert findings.unreachable_from() == []


def test_one_host_alone_needs_nobody() -> None:
    findings = Findings.expected(["127.0.0.1"], [])
    assert findings.is_best
    assert findings.common() == "127.0.0.1"
    assert findings.choice() == {}
