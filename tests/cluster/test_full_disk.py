"""The disk with the jobs' directories is full: jobs go on, and so they do where their driver is killed then."""

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import HVLAUNCH
from tests.cluster.test_sessions import LIMIT
from tests.testhosts.hosts import TestHosts, wait_until

HOSTS = ["-H", "a:2,b:2,c:2,d:2", "--grace", "1", "--fsync"]
WORKER = """
import os, sys, time
open(sys.argv[1], "a").write("began\\\\n")
while not os.path.exists(sys.argv[2]): time.sleep(0.05)
print("." * 100_000)
"""


class SmallDisk:
    """Where jobs have their directories; it is there in the driver's place only."""

    def __init__(self, hosts: TestHosts, path: Path) -> None:
        self.hosts = hosts
        self._path = path
        self._env = {**hosts.driver.env, "XDG_STATE_HOME": str(path)}
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
        hosts.driver.run(mount, check=True)

    def do(self, *words: object) -> "tuple[int, str, str]":
        done = self.hosts.driver.run([*HVLAUNCH, *map(str, words)], env=self._env, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr

    def fill(self) -> None:
        self.hosts.driver.run(["sh", "-c", f"cat /dev/zero >> {self._path}/ballast"])

    @property
    def job(self) -> Path:
        jobs = Path(f"/proc/{self.hosts.driver.pid}/root{self._path}/hvlaunch/jobs")
        [job] = (path for path in jobs.iterdir() if not path.name.startswith("."))
        return job


@pytest.fixture
def disk(cluster: TestHosts, tmp_path: Path) -> Iterator[SmallDisk]:
    yield SmallDisk(cluster, tmp_path)
    cluster.driver.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_job_whose_driver_is_killed_on_a_full_disk_goes_on(disk: SmallDisk, cluster: TestHosts) -> None:
    # The hosts and this machine see both, and nobody sees what the disk has room for.
    began, end = (Path("/var/tmp") / f"hvlaunch-{uuid.uuid4()}" for _ in range(2))
    try:
        code, job, said = disk.do("--detach", *HOSTS, sys.executable, "-c", WORKER, began, end)
        assert code == 0, said
        wait_until(lambda: began.exists() and began.read_text().count("began") == 8, "they run", LIMIT)
        killed = driver_of(cluster)
        # What it could not write any more would be the end of its journal, and nobody could take the job over.
        os.kill(killed, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(killed).status() == psutil.STATUS_STOPPED, "it stands still", LIMIT)
        disk.fill()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: driver_of(cluster) not in {0, killed}, "another driver", LIMIT)
        end.touch()
        code, _, said = disk.do("wait", job.strip())
        assert code == 74, said  # not all of the output was written
        assert began.read_text().count("began") == 8
        _, _, said = disk.do("logs", job.strip())
        assert "bytes of output are lost: no space left on device" in said
        assert json.loads((disk.job / "result.json").read_text())["exit_code"] == 74
        disk.fill()
        refused, _, said = disk.do("--detach", *HOSTS, "true")
        assert (refused, "no space left on device" in said) == (2, True), said
        assert disk.do(*HOSTS, "true")[0] == 0
    finally:
        began.unlink(missing_ok=True)
        end.unlink(missing_ok=True)


def driver_of(hosts: TestHosts) -> int:
    """The pid of the driver that there is, or 0; a full disk may not tell."""
    words = ("run_successor", "--detach")
    found = [one.pid for one in hosts.driver.processes() if any(word in " ".join(one.argv) for word in words)]
    return found[0] if found else 0
