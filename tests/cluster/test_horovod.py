"""Horovod's workers, request by request as its C++ client sends them, on real hosts."""

import re
import sys
from pathlib import Path

from tests.cluster.jobs import PROGRAMS, Job
from tests.cluster.test_relay import shut_out
from tests.testhosts.hosts import TestHosts

BOOTSTRAP = [sys.executable, PROGRAMS / "horovod_bootstrap.py"]
ASK = Path(__file__).parent / "programs" / "ask.py"
RANKS = 7


def status(hosts: TestHosts, place: str, method: str, address: str, key: str) -> str:
    """What the server answers who asks without a token, from a host or the driver's machine."""
    where = hosts.driver if place == "driver" else hosts[place]
    return where.run([sys.executable, str(ASK), method, f"http://{address}/{key}"]).stdout.strip()


def test_only_the_jobs_hosts_may_use_horovods_scopes(cluster: TestHosts) -> None:
    """Host a can't reach the driver's port, so its workers are relayed; d is no host of the job."""
    with shut_out(cluster, "a"):
        job = Job(cluster, ["--horovod", "-H", "a:3,b:2,c:2", *BOOTSTRAP])
        job.saw("met by", RANKS, timeout=120)
        found = dict(re.findall(r"\[(\d)\]<stdout>: met by (\S+) with", job.stdout))
        assert {found[rank].partition(":")[0] for rank in "012"} == {"127.0.0.1"}
        assert {found[rank] for rank in "3456"} == {found["6"]}
        direct = found["6"]
        for place in ("d", "driver"):
            for method in ("GET", "PUT", "DELETE"):
                assert status(cluster, place, method, direct, "global/release") == "401"
        assert status(cluster, "b", "GET", direct, "global/release") == "404"
        for key in ("elsewhere/key", "local_d/0", "-/nonce", "-/keys/global", "global_process_set/0"):
            assert status(cluster, "b", "GET", direct, key) == "401"
        assert status(cluster, "a", "PUT", found["0"], "global/release") == "200"
        assert job.code(60) == 0, job.stderr


def test_without_the_flag_there_are_no_open_scopes(cluster: TestHosts) -> None:
    job = Job(cluster, ["-H", "a:1,b:1", *BOOTSTRAP])
    assert job.code(60) == 1
    assert "HTTP request failed. PUT /global/rank_" in job.stderr
    assert ": 401" in job.stderr


def test_on_this_machine_alone(cluster: TestHosts) -> None:
    job = Job(cluster, ["--horovod", "-np", "2", *BOOTSTRAP]).saw("met by 127.0.0.1", 2)
    address = re.findall(r"met by (\S+)", job.stdout)[0]
    assert status(cluster, "driver", "PUT", address, "global/release") == "200"
    assert job.code() == 0, job.stderr


def test_agents_relay_if_only_ipv6_reaches_the_driver(cluster: TestHosts) -> None:
    """Horovod's client speaks IPv4 alone."""
    with shut_out(cluster, "a", only_ipv4=True):
        job = Job(cluster, ["--horovod", "-H", "a-ipv6:2", *BOOTSTRAP]).saw("met by 127.0.0.1", 2)
        address = re.findall(r"met by (\S+)", job.stdout)[0]
        assert status(cluster, "a", "PUT", address, "global/release") == "200"
        assert job.code() == 0, job.stderr
