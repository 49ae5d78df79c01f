"""The machine where hvlaunch was started restarts: whoever attaches takes the job over, and no worker is restarted, no line lost or doubled."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.outside import KnownJob, known_jobs
from tests.cluster.machines import DriverMachine
from tests.cluster.test_sessions import LIMIT, LINES
from tests.cluster.test_successor import LINE
from tests.testhosts.hosts import TestHosts, wait_until

WORKERS, COUNT = 6, 300


@pytest.fixture
def state() -> Iterator[Path]:
    """A directory that outlives a machine's boot."""
    path = Path(tempfile.mkdtemp(prefix="hvlaunch-state-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def job_of(state: Path) -> KnownJob:
    [job] = known_jobs(state / "hvlaunch" / "jobs")
    return job


def pid_of(job: KnownJob) -> int:
    return int(json.loads((job.directory / "about.json").read_text())["pid"])


def test_a_job_is_taken_over_after_a_restart_and_is_minded_as_before(cluster: TestHosts, state: Path) -> None:
    machine = DriverMachine(cluster, cluster["d"], state)
    lines = [sys.executable, "-c", LINES, COUNT, 0.05, 0]
    begun = machine.do("--detach", "--lease", 60, "-H", "a:2,b:2,c:2", *lines, timeout=LIMIT)
    assert begun.returncode == 0, begun.stderr
    machine.fall()
    time.sleep(1.0)  # the lines of this time are kept by the agents
    machine.rise()
    attached = machine.popen("attach", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = attached.stderr
    assert said is not None
    wait_until(lambda: "Ctrl-C leaves it running" in said.readline(), "attached", LIMIT)
    job = job_of(state)
    machine.detach()
    assert attached.wait(LIMIT) == 0
    [killed] = machine.drivers()
    machine.kill(killed)
    wait_until(lambda: pid_of(job) != killed.pid, "a minder has started another driver", LIMIT)
    ended = machine.do("wait", timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    logs = machine.do("logs", job.id, timeout=LIMIT)
    found = [(int(rank), int(number)) for rank, number in LINE.findall(logs.stdout)]
    assert sorted(found) == [(rank, number) for rank in range(WORKERS) for number in range(COUNT)]
