"""--save-to on several hosts: all hosts are powered off at once, the disk of one is full, a worker is killed during a commit."""

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvlaunch.agent import commits
from hvlaunch.agent.commits import saves
from tests.cluster.elastic_jobs import LIMIT
from tests.cluster.jobs import LIGHT, PROGRAMS, Job
from tests.testhosts.hosts import TestHosts, wait_until

SIZE = 3


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that all hosts see."""
    path = Path(tempfile.mkdtemp(prefix="hvlaunch-saved-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


class SavingJob(Job):
    """A job of a rank on each of a, b and c, which ends when the file `end` exists."""

    def __init__(
        self, cluster: TestHosts, shared: Path, save_to: Path, program: str, *arguments: object
    ) -> None:
        self.cluster = cluster
        self.end = shared / "end"
        options = ("-H", "a:1,b:1,c:1", "--min-np", SIZE, "--save-every", 0.3, "--save-to", save_to)
        command = (sys.executable, PROGRAMS / program, self.end, *arguments)
        super().__init__(cluster, [*options, *command], {"PYTHONPATH": str(LIGHT)})

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, what, LIMIT)
        except TimeoutError as late:
            raise AssertionError(f"{late}\n{self.stdout[-2000:]}\n{self.stderr[-2000:]}") from None

    def finish(self) -> None:
        self.end.touch()
        try:
            assert self.code(LIMIT) == 0, self.stdout + self.stderr
        finally:
            self.end.unlink()

    def power_off(self) -> None:
        """Take the power from the hosts and the driver, all at once. The hosts come back."""
        self.process.kill()
        for name in "abc":
            self.cluster[name].kill()
        self.process.wait(LIMIT)
        for name in "abc":
            self.cluster[name].restore()

    def starts(self) -> list[tuple[str, str]]:
        """Return step and verdict of each rank's start."""
        return re.findall(r"rank \d host \w starts at step (\d+): (\w+)", self.stdout)


def versions(disk: Path) -> list[saves.SavedVersion]:
    """Return the complete versions on disk, newest first."""
    return [items[0].version for items in saves.versions(str(disk)).get("default", ())]


def are_right(disk: Path) -> bool:
    """Return True if there are versions, and each rank's file of each is whole with the bytes of its rank and step."""
    items = [item for both in saves.versions(str(disk)).get("default", ()) for item in both]
    for item in items:
        commit = item.commit
        expected = f"{commit.name.rpartition('.')[2]}.{commit.step} ".encode() * 30_000
        with commits.shared_lock(commit) as descriptor:
            is_whole = commits.is_whole(descriptor, commit)
        if not is_whole or Path(commit.path).read_bytes()[commits.PAGE :][: commit.length] != expected:
            return False
    return bool(items)


def test_new_job_continues_from_disk_after_all_hosts_lost_power(cluster: TestHosts, shared: Path) -> None:
    disk = shared / "disk"
    job = SavingJob(cluster, shared, disk, "keep_steps.py", "together")
    job.until(lambda: len(versions(disk)) >= 2, "two versions are on disk")
    job.power_off()
    newest, older = versions(disk)[:2]
    with (disk / "default.1.{}-{}-{}".format(*newest)).open("r+b") as file:
        file.seek(commits.PAGE + 500)
        file.write(b"corrupt")
    job = SavingJob(cluster, shared, disk, "keep_steps.py", "together")
    job.until(lambda: len(job.starts()) == SIZE, "the new job starts")
    job.finish()
    assert job.starts() == [(str(older[2]), "right")] * SIZE
    assert f"the commit of step {newest[2]} in {disk} is corrupt" in job.stderr
    assert f"training continues from step {older[2]} in the directory of --save-to" in job.stderr


def test_worker_killed_during_a_commit_leaves_no_version_on_disk(cluster: TestHosts, shared: Path) -> None:
    disk, die = shared / "disk", Path("/tmp/die")
    job = SavingJob(cluster, shared, disk, "keep_bytes.py", die)
    job.until(lambda: versions(disk), "a version is on disk")
    cluster["b"].run(["touch", str(die)], check=True)
    assert job.code(LIMIT) != 0
    assert are_right(disk)


def test_full_disk_of_a_host_is_named_and_older_versions_stay(cluster: TestHosts, shared: Path) -> None:
    disk = shared / "disk"
    disk.mkdir()
    job = SavingJob(cluster, shared, disk, "keep_bytes.py")
    job.until(lambda: versions(disk), "a version is on disk")
    # The directory of one host is on a disk of its own from here on, which is full.
    cluster["b"].run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    job.until(lambda: "host b: " in job.stderr, "the host is named")
    job.finish()
    assert f"commits are not saved to {disk}: host b: no space left on device" in job.stderr.lower()
    assert are_right(disk)


def test_directory_of_each_host_alone_is_named(cluster: TestHosts, shared: Path) -> None:
    disk = shared / "disk"
    disk.mkdir()
    for name in "abc":
        cluster[name].run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True)
    job = SavingJob(cluster, shared, disk, "keep_bytes.py")
    job.until(lambda: "is another directory on host" in job.stderr, "the directories are told apart")
    job.finish()
    assert f"commits are not saved: {disk} is another directory on host b than on host a" in job.stderr
