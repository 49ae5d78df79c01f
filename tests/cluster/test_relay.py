"""Hosts from where the driver's port can't be reached: their agents relay over SSH, without a flag."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.jobs import PROGRAMS, Job
from tests.testhosts.hosts import TestHosts

EXCHANGE = [sys.executable, PROGRAMS / "exchange_values.py"]


@contextmanager
def shut_out(hosts: TestHosts, *names: str, only_ipv4: bool = False) -> Iterator[None]:
    """Every packet that would open a connection from these hosts to the driver's is lost."""
    ways = {"iptables": hosts.driver.address, "ip6tables": hosts.driver.address6}
    if only_ipv4:
        del ways["ip6tables"]

    def rules(verb: str) -> None:
        for name in names:
            for tool, address in ways.items():
                rule = [verb, "OUTPUT", "-d", address, "-p", "tcp", "--syn", "-j", "DROP"]
                hosts[name].run([tool, *rule], check=True)

    rules("-A")
    try:
        yield
    finally:
        rules("-D")


def ways(job: Job) -> list[str]:
    """Where each rank found the rendezvous, without the port."""
    found = re.findall(r"^\[(\d+)\]<stdout>: exchanged by https?://(\S+):\d+ in", job.stdout, re.MULTILINE)
    return [address for _, address in sorted(found)]


def test_hosts_that_are_shut_out_relay(cluster: TestHosts) -> None:
    with shut_out(cluster, "a", "b"):
        job = Job(cluster, ["--verbose", "-H", "a:2,b:2,c:1", *EXCHANGE])
        assert job.code(120) == 0, job.stderr
    assert ways(job) == ["127.0.0.1"] * 4 + [cluster.driver.address]
    for name in "ab":
        assert job.stderr.count(f"host {name}: its agent relays to the rendezvous, at 127.0.0.1:") == 1
    assert "host c: its agent relays" not in job.stderr
    assert "can't reach the driver's rendezvous" not in job.stderr


def test_all_hosts_relay_on_request(cluster: TestHosts) -> None:
    job = Job(cluster, ["--rendezvous-relay", "always", "-H", "a:2,b:1", *EXCHANGE])
    assert job.code(120) == 0, job.stderr
    assert ways(job) == ["127.0.0.1"] * 3
    assert "relay" not in job.stderr
