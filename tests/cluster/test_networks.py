"""Networks as sites have them: what leads nowhere is not chosen, without a flag."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import PROGRAMS, Job, without_progress
from tests.testhosts.hosts import TestHosts

pytestmark = pytest.mark.xdist_group("torch")

COLLECTIVES = [sys.executable, PROGRAMS / "collectives.py"]
SHOW = ["sh", "-c", "echo at $MASTER_ADDR by $GLOO_SOCKET_IFNAME"]


def shown(job: Job) -> list[tuple[str, str]]:
    """MASTER_ADDR and interface by rank."""
    assert job.code() == 0, job.stderr
    found = re.findall(r"^\[(\d+)\]<stdout>: at (\S+) by (\S+)$", job.stdout, re.MULTILINE)
    return [(address, interface) for _, address, interface in sorted(found)]


@pytest.fixture
def three(new_hosts) -> Iterator[TestHosts]:
    yield new_hosts(["a", "b", "c"])


def add_interface(hosts: TestHosts, host: str, name: str, address: str) -> None:
    """An interface that is up and has the address, and leads nowhere."""
    hosts[host].run(["ip", "link", "add", name, "type", "bridge"], check=True)
    hosts[host].run(["ip", "address", "add", address, "dev", name], check=True)
    hosts[host].run(["ip", "link", "set", name, "up"], check=True)


def test_dead_ends_and_equal_docker_bridges(three: TestHosts) -> None:
    for number, name in enumerate("abc", 1):
        add_interface(three, name, "docker0", "172.17.0.1/16")
        add_interface(three, name, "ib0", f"192.168.44.{number}/24")
        add_interface(three, name, "ib1", f"192.168.45.{number}/24")
    job = Job(three, ["-H", "a:1,c:1", *COLLECTIVES])
    assert job.code() == 0, job.stderr
    assert job.stdout.count("is right") == 2
    assert shown(Job(three, ["-H", "a:1,b:1,c:1", *SHOW])) == [(three["a"].address, "eth0")] * 3


def test_interfaces_may_have_other_names_on_other_hosts(three: TestHosts) -> None:
    three["b"].run(
        ["sh", "-c", "ip link set eth0 down && ip link set eth0 name enp7 && ip link set enp7 up"], check=True
    )
    three["b"].run(["ip", "-6", "address", "add", f"{three['b'].address6}/64", "dev", "enp7", "nodad"])
    found = shown(Job(three, ["-H", "a:1,b:1,c:1", *SHOW]))
    assert found == [(three["a"].address, name) for name in ("eth0", "enp7", "eth0")]
    job = Job(three, ["-H", "a:1,b:1", *COLLECTIVES])
    assert job.code() == 0, job.stderr


def test_ipv6_only(three: TestHosts) -> None:
    for name in "abc":
        three[name].run(["ip", "-4", "address", "flush", "dev", "eth0"], check=True)
    hosts = ["-H", "a-ipv6:1,b-ipv6:1,c-ipv6:1"]
    assert shown(Job(three, [*hosts, *SHOW])) == [(three["a"].address6, "eth0")] * 3
    job = Job(three, ["-H", "a-ipv6:1,c-ipv6:1", *COLLECTIVES])
    assert job.code() == 0, job.stderr
    assert job.stdout.count("is right") == 2


def test_interfaces_by_name_are_taken_as_they_are(three: TestHosts) -> None:
    for number, name in enumerate("abc", 1):
        add_interface(three, name, f"ib{number}", f"192.168.44.{number}/24")
    job = Job(three, ["--network-interfaces", "ib1,ib2,ib3", "-H", "a:1,b:1,c:1", *SHOW])
    assert shown(job) == [("192.168.44.1", f"ib{number}") for number in (1, 2, 3)]
    job = Job(three, ["--network-interfaces", "ib1", "-H", "a:1,b:1", *SHOW])
    assert job.code() == 2
    assert "host b: none of the interfaces ib1 has an address on it" in job.stderr


def test_a_pair_in_the_middle_that_cannot(three: TestHosts) -> None:
    """b and c reach a, and a reaches b, but b does not reach c."""
    for tool, source in (("iptables", three["b"].address), ("ip6tables", three["b"].address6)):
        three["c"].run([tool, "-A", "INPUT", "-s", source, "-p", "tcp", "--syn", "-j", "REJECT"], check=True)
    # Their slots are counted first, so that no host starts before all have met.
    job = Job(three, ["-H", "a,b,c", "true"])
    assert job.code() == 69
    assert without_progress(job.stderr)[0].startswith("hvlaunch: host b: can't connect to host c (tried ")
    assert three["c"].address in job.stderr
    assert job.stderr.endswith("\n  The job ends: no worker was started.\n")


def connect_directly(hosts: TestHosts) -> None:
    """Give the hosts a network besides eth0: a bridge in host a, and cables from it; each host has another name for it."""
    hosts["a"].run(["ip", "link", "add", "fast1", "type", "bridge"], check=True)
    for number, name in ((2, "b"), (3, "c")):
        with Path(f"/proc/{hosts[name].pid}/ns/net").open() as other:
            end = ["peer", "name", f"fast{number}", "netns", f"/proc/self/fd/{other.fileno()}"]
            add = ["ip", "link", "add", f"to-{name}", "type", "veth", *end]
            hosts["a"].run(add, check=True, pass_fds=[other.fileno()])
        hosts["a"].run(["ip", "link", "set", f"to-{name}", "master", "fast1", "up"], check=True)
    for number, name in enumerate("abc", 1):
        hosts[name].run(["ip", "address", "add", f"10.88.0.{number}/24", "dev", f"fast{number}"], check=True)
        hosts[name].run(["ip", "link", "set", f"fast{number}", "up"], check=True)


@pytest.mark.long
def test_nccl_auto_finds_the_fast_network_and_near_hosts(three: TestHosts) -> None:
    """ib0 leads nowhere, eth0 is slow, and the fast network has another name on each host. b is far from a and c."""
    for number, name in enumerate("abc", 1):
        add_interface(three, name, "ib0", f"192.168.44.{number}/24")
        three[name].delay(20 if name == "b" else 5)
    connect_directly(three)
    show = f"echo at $MASTER_ADDR by $GLOO_SOCKET_IFNAME; exec {sys.executable} {PROGRAMS / 'collectives.py'}"
    options = ["--nccl", "auto", "--rank-order", "measured", "--verbose", "-H", "a:1,b:1,c:1"]
    job = Job(three, [*options, "sh", "-c", show])
    assert [interface for _, interface in shown(job)] == ["fast1", "fast3", "fast2"], job.stderr
    assert job.stdout.count("is right") == 3
    assert "--nccl auto: sockets use 10.88.0.0/24: " in job.stderr
    # The user's own choice stays, also a bad one.
    job = Job(three, [*options[:2], "-x", "GLOO_SOCKET_IFNAME=ib0", "-H", "a:1,b:1", *SHOW])
    assert [interface for _, interface in shown(job)] == ["ib0", "ib0"]
