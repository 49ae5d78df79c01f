"""Faults of the network between hosts: `hvlaunch check` names the host and the next step."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.testhosts.hosts import TestHosts

TO_OTHERS = ["-s", "10.77.1.0/24"]


def check(hosts: TestHosts) -> tuple[int, list[tuple[str, str, str]]]:
    """The exit code, and host, subject and text of each finding about the network."""
    # The kernel would send 64 kB at once between hosts on one machine, which no cable does.
    for host in hosts:
        host.run(["ip", "link", "set", "dev", "eth0", "gso_max_segs", "1"], check=True)
    result = hosts.driver.run(
        [sys.executable, "-m", "hvlaunch", "check", "--json", "-H", ",".join(hosts.names)]
    )
    findings = json.loads(result.stdout)["findings"]
    subjects = {"connections", "ports", "packet size", "loss", "latency", "bandwidth"}
    network = [finding for finding in findings if finding["subject"] in subjects]
    assert all(finding["remedy"] for finding in network)
    return result.returncode, [
        tuple(finding[key] for key in ("host", "subject", "text")) for finding in network
    ]


def both(hosts: TestHosts, host: str, *words: str) -> None:
    hosts[host].touched = True
    for tool in ("iptables", "ip6tables"):
        hosts[host].run([tool, "-A", "INPUT", "-p", "tcp", *words, "-j", "DROP"], check=True)


def far(hosts: TestHosts) -> None:
    hosts["c"].delay(25)


def lossy(hosts: TestHosts) -> None:
    hosts["c"].touched = True
    rule = ["-p", "tcp", "-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP"]
    hosts["c"].run(["iptables", "-A", "INPUT", *TO_OTHERS, *rule], check=True)


def slow(hosts: TestHosts) -> None:
    hosts["c"].touched = True
    tbf = "tc qdisc add dev eth0 root tbf rate 10mbit burst 16kb latency 50ms"
    hosts["c"].run(tbf.split(), check=True)


def one_way(hosts: TestHosts) -> None:
    both(hosts, "c", "--syn", "!", "--dport", "22")


def blocked_range(hosts: TestHosts) -> None:
    both(hosts, "c", "--syn", "--dport", "40000:60999")


def black_hole(hosts: TestHosts) -> None:
    hosts["c"].touched = True
    for chain, end in (("INPUT", "-s"), ("OUTPUT", "-d")):
        rule = [end, "10.77.1.0/24", "-m", "length", "--length", "1401:65535", "-j", "DROP"]
        hosts["c"].run(["iptables", "-A", chain, *rule], check=True)


def no_link(hosts: TestHosts) -> None:
    hosts["b"].part(hosts["c"])


@pytest.mark.parametrize(
    ("break_network", "subject", "text", "code"),
    [
        # Beside busy processes the measures of time say little.
        pytest.param(far, "latency", "to and from the other hosts", 0, marks=pytest.mark.long),
        pytest.param(lossy, "loss", "from the other hosts to it", 0, marks=pytest.mark.long),
        pytest.param(slow, "bandwidth", "from it to the other hosts", 0, marks=pytest.mark.long),
        (one_way, "connections", "no other host can connect to it", 69),
        (blocked_range, "ports", "blocked ports from the other hosts to it: ", 69),
        (black_hole, "packet size", "packets of more than 1400 bytes vanish", 69),
        (no_link, "connections", "hosts b and c can't connect to each other", 69),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_fault_of_the_network_is_named(
    cluster: TestHosts, break_network: Callable[[TestHosts], Any], subject: str, text: str, code: int
) -> None:
    break_network(cluster)
    returned, [finding] = check(cluster)
    assert finding[:2] == ("c", subject)
    assert text in finding[2]
    assert returned == code


def test_good_network_has_no_finding(cluster: TestHosts) -> None:
    assert check(cluster) == (0, [])


@pytest.mark.long
def test_deep_check_names_a_slow_host(cluster: TestHosts) -> None:
    """Three hosts, so three rounds: an odd number leaves one without a partner in each."""
    slow(cluster)
    words = ["check", "--json", "--deep", "-H", "a,b,c", sys.executable]
    result = cluster.driver.run([sys.executable, "-m", "hvlaunch", *words], timeout=300)
    findings = json.loads(result.stdout)["findings"]
    [finding] = [finding for finding in findings if finding["subject"] in ("all_reduce", "matmul")]
    assert (finding["host"], finding["level"], finding["subject"]) == ("c", "warning", "all_reduce")
    assert "for the fastest pairs" in finding["text"]
