"""What workers have printed last, and nobody has read yet, outlives their agents' end, and their driver's."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.heirs import LIMIT, Heir
from tests.cluster.jobs import HVLAUNCH, agents
from tests.cluster.test_successor import is_whole
from tests.full_pipe import full_pipe
from tests.testhosts.hosts import TestHosts, wait_until

LINES = """
import os
for number in range(200):
    os.write(1, b"line %s %d \\n" % (os.environb[b"HVLAUNCH_RANK"], number))
"""
JOB = ["-H", "a:2,b:2,c:2,d:2", "--grace", "1", "--reconnect-timeout", "20", sys.executable, "-c", LINES]


def killed_at_the_end(cluster: TestHosts, tmp_path: Path, *options: str) -> tuple[Heir, int]:
    """A job whose driver is killed when all workers have ended, and the pipe in which nothing had room."""
    reader, writer = full_pipe()
    journal = tmp_path / "journal"
    process = cluster.driver.popen(
        [*HVLAUNCH, *options, *JOB],
        env={**cluster.driver.env, "HVLAUNCH_JOURNAL": str(journal)},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    job = Heir(cluster, process)
    wait_until(
        lambda: journal.exists() and journal.read_text().count('"Release"') == 4, "agents are to end", LIMIT
    )
    job.kill()
    return job, reader


def test_a_driver_killed_after_its_workers_ended_prints_nothing(cluster: TestHosts, tmp_path: Path) -> None:
    # A successor may start slowly beside other tests: the agents wait for the lease.
    job, reader = killed_at_the_end(cluster, tmp_path, "--lease", "60")
    assert job.succeed().wait(LIMIT) == 0
    is_whole(job.stored, 200)
    with os.fdopen(reader, "rb") as pipe:
        assert not pipe.read().strip(b"\0")


def test_output_that_no_driver_fetched_within_the_lease_is_said_to_be_lost(
    cluster: TestHosts, tmp_path: Path
) -> None:
    job, reader = killed_at_the_end(cluster, tmp_path, "--lease", "2")
    os.close(reader)
    wait_until(
        lambda: not any(agents(cluster[host].processes()) for host in "abcd"), "the agents have ended", LIMIT
    )
    assert job.succeed().wait(LIMIT) == 0
    lost = [host for host in "abcd" if f"host {host}: lost: its agent ended" in job.stored]
    assert lost == list("abcd")
    assert "a longer --lease" in job.stored
