"""Files in shared memory: what they keep, and how they refuse."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvlaunch.record import PAGE, SharedFile


def test_values_outlive_a_killed_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from hvlaunch.record import SharedFile\n"
        "SharedFile(Path(sys.argv[1])).map(0, 100)[7:10] = b'abc'\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "f"], check=False).returncode == -9
    mapping = SharedFile(tmp_path / "f").map(0, 100)
    assert mapping[:12] == b"\0" * 7 + b"abc" + b"\0" * 2


def test_a_mapping_outlives_its_file_object(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "f")
    mapping = file.map(PAGE, PAGE)
    file.close()
    file.close()
    mapping[0] = 65
    assert (tmp_path / "f").read_bytes() == bytes(PAGE) + b"A" + bytes(PAGE - 1)


def test_reserving_blocks_keeps_the_values(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"values")
    file = SharedFile(tmp_path / "f")
    file.map(0, 4 * PAGE, is_sparse=True)
    file.reserve(0, PAGE)
    file.reserve(2 * PAGE, PAGE)
    assert (tmp_path / "f").read_bytes() == b"values".ljust(4 * PAGE, b"\0")


@pytest.mark.parametrize("taken", [0, 100])
def test_a_full_disk_is_an_error_and_not_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    def full(_descriptor: int, _data: bytes, _offset: int) -> int:
        if taken:
            return taken
        raise OSError(errno.ENOSPC, "No space left on device")

    file = SharedFile(tmp_path / "f")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        file.map(0, PAGE)
    assert caught.value.errno == errno.ENOSPC


def test_only_its_user_can_read_it_and_no_link_is_followed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        SharedFile(tmp_path / "f", is_new=True).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        SharedFile(tmp_path / "f", is_new=True)
    (tmp_path / "link").symlink_to("f")
    with pytest.raises(OSError, match="link"):
        SharedFile(tmp_path / "link")
