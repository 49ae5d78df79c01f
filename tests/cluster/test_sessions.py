"""A job outlives its connections: no worker is restarted, no line is lost or doubled, and nobody else gets in."""

import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.cluster.jobs import Job, agent_of
from tests.testhosts.hosts import Host, TestHosts, wait_until

LIMIT = 90.0
PAUSE = 0.05
LINES = """
import os, sys, time
rank = os.environ["HVLAUNCH_RANK"]
for number in range(int(sys.argv[1])):
    print("line", rank, number, "." * int(sys.argv[3]), flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start(hosts: TestHosts, *options: object, lines: int = 200, pause: float = PAUSE, width: int = 0) -> Job:
    """Two workers on each of four hosts, each of which numbers its lines."""
    fixed = ["-H", "a:2,b:2,c:2,d:2", "--grace", 1, *options]
    return Job(hosts, [*fixed, sys.executable, "-c", LINES, lines, pause, width])


def is_whole(job: Job, lines: int = 200) -> None:
    """All lines of all ranks, each once and in order, and nobody was restarted."""
    found: dict[int, list[int]] = {rank: [] for rank in range(8)}
    for rank, number in re.findall(r"line (\d+) (\d+) ", job.stdout):
        found[int(rank)].append(int(number))
    assert found == {rank: list(range(lines)) for rank in range(8)}
    assert "restart" not in job.stderr
    assert "round" not in job.stderr


def sshd_sessions(host: Host) -> list[str]:
    return [str(process.pid) for process in host.processes() if process.comm.startswith("sshd")]


def kill_sshd(hosts: TestHosts) -> None:
    hosts["b"].run(["kill", "-9", *sshd_sessions(hosts["b"])], check=True)


def reset(hosts: TestHosts) -> None:
    """A firewall answers what comes of this connection with RST, until it is gone."""
    rule = ["INPUT", "-p", "tcp", "--dport", "22", "-j", "REJECT", "--reject-with", "tcp-reset"]
    hosts["b"].run(["iptables", "-I", *rule], check=True)
    time.sleep(0.3)
    hosts["b"].run(["iptables", "-D", *rule], check=True)


def reset_all(hosts: TestHosts) -> None:
    for host in hosts:
        host.run(["kill", "-9", *sshd_sessions(host)], check=True)


KINDS = [(), ("--min-np", 8)]


@pytest.mark.parametrize("options", KINDS, ids=["static", "elastic"])
@pytest.mark.parametrize("harm", [kill_sshd, reset, reset_all])
def test_a_connection_is_lost(
    cluster: TestHosts, harm: Callable[[TestHosts], None], options: tuple[object, ...]
) -> None:
    job = start(cluster, *options).saw("line 2 20 ", 1)
    harm(cluster)
    job.saw("host b: connected again after", 1)
    assert job.code(LIMIT) == 0, job.stderr
    is_whole(job)


def test_the_only_host_of_a_job_is_connected_again(cluster: TestHosts) -> None:
    job = Job(cluster, ["-H", "b:1", sys.executable, "-c", LINES, 200, PAUSE, 0]).saw("line 0 20 ", 1)
    kill_sshd(cluster)
    job.saw("host b: connected again after", 1)
    assert job.code(LIMIT) == 0, job.stderr
    assert re.findall(r"line 0 (\d+) ", job.stdout) == [str(number) for number in range(200)]


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_in_the_middle_of_much_output(cluster: TestHosts, client: str) -> None:
    job = start(cluster, "--ssh-client", client, lines=3000, pause=0.0, width=1000).saw("line 2 200 ", 1)
    kill_sshd(cluster)
    assert job.code(LIMIT) == 0, job.stderr
    is_whole(job, 3000)


# All links are cut in test_cuts.py, at the driver's end.
@pytest.mark.parametrize("names", ["b", pytest.param("abcd", marks=pytest.mark.long)])
def test_links_are_cut_for_20_seconds(cluster: TestHosts, names: str) -> None:
    job = start(cluster, "--lease", 60, lines=400).saw("line 2 20 ", 1)
    for name in names:
        cluster[name].cut()
    time.sleep(20.0)  # as long as it takes is what is tested
    for name in names:
        cluster[name].heal()
    assert job.code(LIMIT) == 0, job.stderr
    is_whole(job, 400)


def test_a_host_that_is_silent_for_long_gets_another_connection(cluster: TestHosts) -> None:
    """Its packets are dropped for one connection alone, as by a firewall that has forgotten it."""
    job = start(cluster, "--lease", 8, lines=400).saw("line 2 20 ", 1)
    listing = cluster["b"].run(["ss", "-Htn", "state", "established", "sport", "=", ":22"], check=True).stdout
    [port] = {line.split()[3].rpartition(":")[2] for line in listing.splitlines()}
    rule = ["INPUT", "-p", "tcp", "--dport", "22", "--sport", port, "-j", "DROP"]
    cluster["b"].run(["iptables", "-I", *rule], check=True)
    job.saw("host b: the connection is lost (it was silent)", 1)
    job.saw("host b: connected again after", 1)
    assert job.code(LIMIT) == 0, job.stderr
    is_whole(job, 400)
    cluster["b"].touched = True


def test_an_agent_that_was_killed_is_lost_at_once(cluster: TestHosts) -> None:
    """On its first connection as ever, and on another, where a carrier says that there is no agent."""
    job = start(cluster, "--verbose", lines=2000).saw("line 2 20 ", 1)
    kill_sshd(cluster)
    job.saw("host b: connected again after", 1)
    agent = agent_of(cluster["b"])
    cluster["b"].run(["kill", "-9", str(agent.pid)], check=True)
    began = time.monotonic()
    assert job.code(LIMIT) == 69
    assert time.monotonic() - began < 20.0  # and not the lease
    assert "its agent is gone" in job.stderr


def test_nothing_is_left_of_a_job_whose_driver_was_killed(cluster: TestHosts) -> None:
    job = start(cluster, lines=100_000).saw("line 2 20 ", 1)
    job.send(signal.SIGKILL).code()
    began = time.monotonic()
    wait_until(lambda: not any(host.user_processes() for host in cluster), "nothing is left", LIMIT)
    assert time.monotonic() - began > 4.0  # the agents waited for a driver, for 5 s


def test_a_driver_that_is_interrupted_leaves_at_once(cluster: TestHosts) -> None:
    job = start(cluster, lines=100_000).saw("line 2 20 ", 1)
    kill_sshd(cluster)
    job.saw("host b: connected again after", 1)
    assert job.interrupt().code() == 130
    assert not any(host.user_processes() for host in cluster)


def test_this_machines_own_agent_waits_no_longer_than_others_for_another_driver(cluster: TestHosts) -> None:
    words = ["-H", "localhost:1,b:1", "--grace", 1, sys.executable, "-c", LINES, 100_000, PAUSE, 0]
    job = Job(cluster, words).saw("line 0 20 ", 1).saw("line 1 20 ", 1)
    job.send(signal.SIGKILL).code()
    began = time.monotonic()
    wait_until(
        lambda: not cluster.driver.processes() and not cluster["b"].user_processes(), "nothing is left", LIMIT
    )
    assert time.monotonic() - began > 4.0
