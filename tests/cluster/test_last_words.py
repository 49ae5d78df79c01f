"""What workers have printed last, and nobody has read yet, outlives their agents' end, and their driver's."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.heirs import LIMIT, Heir
from tests.cluster.jobs import HVLAUNCH
from tests.cluster.test_successor import is_whole
from tests.full_pipe import full_pipe
from tests.testhosts.hosts import TestHosts, wait_until

LINES = """
import os
for number in range(200):
    os.write(1, b"line %s %d \\n" % (os.environb[b"HVLAUNCH_RANK"], number))
"""
JOB = ["-H", "a:2,b:2,c:2,d:2", "--grace", "1", "--reconnect-timeout", "20", sys.executable, "-c", LINES]


def test_a_driver_killed_after_its_workers_ended_prints_nothing(cluster: TestHosts, tmp_path: Path) -> None:
    reader, writer = full_pipe()
    journal = tmp_path / "journal"
    process = cluster.driver.popen(
        [*HVLAUNCH, *JOB],
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
    assert job.succeed().wait(LIMIT) == 0
    is_whole(job.stored, 200)
    with os.fdopen(reader, "rb") as pipe:
        assert not pipe.read().strip(b"\0")
