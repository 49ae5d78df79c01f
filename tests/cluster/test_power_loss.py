"""The machine where hvlaunch was started loses its power: what its disk did not have yet is gone. With --fsync the job goes on all the same."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import DriverMachine
from tests.cluster.test_driver_machine import COUNT, WORKERS, state
from tests.cluster.test_sessions import LIMIT, LINES
from tests.cluster.test_successor import LINE
from tests.testhosts.hosts import Host, TestHosts, wait_until

__all__ = ["state"]

SIZE = 64 << 20


class Disk:
    """A disk with an ext4 of its own, in an image. Its host is the only one that sees it."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._host = host
        self._image = folder / "disk.img"
        self._device = ""
        self.path = folder / "disk"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", self._image], check=True)
        self.mount()

    def mount(self) -> None:
        found = subprocess.run(
            ["losetup", "--find", "--show", self._image], check=True, capture_output=True, text=True
        )
        self._device = found.stdout.strip()
        number = Path(self._device).stat().st_rdev
        node = f"/tmp/disk{os.minor(number)}"
        for words in (
            ["mknod", node, "b", str(os.major(number)), str(os.minor(number))],
            ["mount", node, str(self.path)],
        ):
            self._host.run(words, check=True)

    def freeze(self) -> None:
        """From here on it is as it would be now without power: what is in the system's memory alone is not there."""
        for process in self._host.user_processes():
            self._host.run(["kill", "-STOP", str(process.pid)])
        left = self._image.with_suffix(".left")
        shutil.copyfile(self._image, left)
        left.rename(self._image)
        self.detach()

    def detach(self) -> None:
        """Give the device back, as soon as nobody has it mounted."""
        subprocess.run(["losetup", "--detach", self._device], check=True)


@pytest.fixture
def disk(cluster: TestHosts, state: Path) -> Iterator[Disk]:
    disk = Disk(cluster["d"], state)
    yield disk
    cluster["d"].run(["umount", "--lazy", str(disk.path)], check=True)
    disk.detach()


@pytest.mark.long
@pytest.mark.parametrize("lines", [20, 150, 600, 1000])
def test_a_job_goes_on_after_a_loss_of_power(cluster: TestHosts, disk: Disk, lines: int) -> None:
    """Its workers run on: none is started again. Of output, what was kept last may be missing; none comes twice."""
    machine = DriverMachine(cluster, cluster["d"], disk.path)
    program = [sys.executable, "-c", LINES, COUNT, 0.05, 0]
    begun = machine.do("--detach", "--fsync", "--lease", 60, "-H", "a:2,b:2,c:2", *program, timeout=LIMIT)
    assert begun.returncode == 0, begun.stderr
    job = begun.stdout.strip()
    wait_until(lambda: machine.do("logs", job, timeout=LIMIT).stdout.count("\n") >= lines, "it prints", LIMIT)
    disk.freeze()
    machine.fall()
    machine.rise()
    disk.mount()
    attached = machine.do("attach", job, timeout=LIMIT)
    assert attached.returncode == 0, attached.stderr
    found = LINE.findall(machine.do("logs", job, timeout=LIMIT).stdout)
    for rank in range(WORKERS):
        numbers = [int(number) for owner, number in found if int(owner) == rank]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == COUNT - 1
