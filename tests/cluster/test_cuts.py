"""Cuts that heal within the lease; benchmarks/cuts.py has many of them, of each kind of job."""

import shutil
import socket
import time

import pytest

from hvlaunch.ssh.streams import persist
from tests.cluster.jobs import Job
from tests.testhosts.hosts import TestHosts

LEASE = 8.0
TICK = "<stdout>: tick"


def may_persist() -> bool:
    with socket.socket() as sock:
        return persist(sock)


@pytest.mark.skipif(not may_persist(), reason="TCP_RTO_MAX_MS: Linux 6.15")
@pytest.mark.parametrize(
    "way", [["--ssh-client", "paramiko"], ["--ssh-client", "openssh"], ["--mpi"]], ids=lambda way: way[-1]
)
@pytest.mark.parametrize("each", ["echo tick", "[ ! -e /tmp/healed ] || echo tick"], ids=["prints", "silent"])
def test_the_drivers_link_is_away_for_most_of_the_lease(
    cluster: TestHosts, way: list[str], each: str
) -> None:
    if way == ["--mpi"] and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    job = Job(
        cluster,
        [
            "-H",
            "a:1,b:1",
            "--lease",
            LEASE,
            *way,
            "sh",
            "-c",
            f"echo ready; while :; do {each}; sleep 0.05; done",
        ],
    )
    job.saw("ready", 2)
    cluster.driver.cut()
    # There is no condition to wait for: the length of the cut is what is tested.
    time.sleep(0.85 * LEASE)
    cluster.driver.heal()
    for name in "ab":
        cluster[name].run(["touch", "/tmp/healed"], check=True)
    for rank in (0, 1):
        ticks = f"[{rank}]{TICK}"
        job.saw(ticks, job.stdout.count(ticks) + 50)  # more than had time to come before the cut
    assert job.interrupt().code() == 130
    assert "lost: " not in job.stderr  # a host; a connection that was silent may be
    cluster["a"].touched = cluster["b"].touched = True
