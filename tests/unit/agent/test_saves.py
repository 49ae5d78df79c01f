"""Commits on disk: complete versions, what is removed, failures in the middle."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from hvlaunch.agent import commits
from hvlaunch.agent.commits import PAGE, KeptCommit, saves

LENGTH = (1 << 22) + 99


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def write(disk: Path, version: saves.SavedVersion, name: str = "default.0", size: int = 1) -> Path:
    """Save a commit of random bytes; return its file in place of the one in memory."""
    memory = disk.parent / "memory"
    memory.mkdir(exist_ok=True)
    generation, number, step = version
    commit = KeptCommit(name, number, step, size, 0, LENGTH)
    descriptor = commits.begin(str(memory), commit)
    try:
        os.pwrite(descriptor, os.urandom(LENGTH), PAGE)
        commits.seal(descriptor, commit)
        saves.save(str(disk), generation, commit, descriptor)
    finally:
        commits.release(descriptor)
    return next(Path(item.path) for item in commits.held(str(memory)) if item.name == name)


def names(disk: Path) -> list[str]:
    return sorted(item.name for item in disk.iterdir())


def test_saved_file_is_the_commit(disk: Path) -> None:
    path = write(disk, (7, 0, 5))
    assert (disk / "default.0.7-0-5").read_bytes() == path.read_bytes()
    (item,) = saves.saved(str(disk))
    assert (item.version, item.commit.name, item.commit.length) == ((7, 0, 5), "default.0", LENGTH)


def test_version_is_complete_with_all_ranks_and_a_later_generation_is_newer(disk: Path) -> None:
    for version in ((7, 3, 5), (8, 0, 6)):
        for rank in range(2):
            write(disk, version, f"default.{rank}", 2)
    write(disk, (8, 0, 7), "default.0", 2)
    write(disk, (8, 0, 7), "default.shared", 0)
    assert saves.complete(saves.saved(str(disk))) == {
        "default": [(8, 0, 6), (7, 3, 5)],
        "default.shared": [(8, 0, 7)],
    }


def test_incomplete_newer_versions_keep_two_complete_ones(disk: Path) -> None:
    for step in range(1, 4):
        for rank in range(2):
            write(disk, (7, 0, step), f"default.{rank}", 2)
    write(disk, (7, 0, 4), "default.0", 2)
    for step in (1, 9):
        (disk / f".default.1.7-0-{step}.part").write_bytes(b"half")
    (disk / "model.pt").write_bytes(b"of the user")
    saves.prune(str(disk))
    assert names(disk) == sorted(
        [f"default.{rank}.7-0-{step}" for rank in range(2) for step in (2, 3)]
        + ["default.0.7-0-4", ".default.1.7-0-9.part", "model.pt"]
    )


def test_damaged_file_does_not_count(disk: Path) -> None:
    write(disk, (7, 0, 5))
    path = disk / "default.0.7-0-5"
    whole = path.read_bytes()
    path.rename(disk / "default.0.7-0-6")  # another version's name
    (disk / "default.1.7-0-5").write_bytes(whole)  # another rank's
    (disk / "default.0.7-0-7").write_bytes(whole[:100])
    assert saves.versions(str(disk)) == {}
    assert saves.versions(str(disk / "missing")) == {}


def test_full_disk_leaves_the_versions_before(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(disk, (7, 0, 5))
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 4 * PAGE:
            return real(descriptor, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(disk, (7, 0, 6))
    assert names(disk) == ["default.0.7-0-5"]


def test_kill_in_the_middle_leaves_the_version_before(disk: Path) -> None:
    write(disk, (7, 0, 1))

    def save_for_ever() -> None:
        for step in range(2, 10_000):
            write(disk, (7, 0, step))
            saves.prune(str(disk))

    for delay in range(20):
        writer = multiprocessing.get_context("fork").Process(target=save_for_ever)
        writer.start()
        time.sleep(0.002 * delay)
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        items = saves.saved(str(disk))
        assert items
        for item in items:
            with Path(item.commit.path).open("rb") as file:
                assert commits.is_whole(file.fileno(), item.commit)


def test_directory_has_one_id_for_all_hosts(disk: Path) -> None:
    first = saves.prepare(str(disk))
    assert first
    assert saves.prepare(str(disk)) == first
    assert names(disk) == [".hvlaunch-directory"]
    assert saves.prepare(str(disk.parent / "other")) not in ("", first)


@pytest.mark.parametrize("content", [None, "", "x" * 31, "x" * 33, "../" * 11])
def test_directory_with_a_strange_file_has_no_id(disk: Path, content: str | None) -> None:
    path = disk / ".hvlaunch-directory"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    assert saves.prepare(str(disk)) == ""


def test_directory_without_hard_links_has_no_id(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_paths: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert saves.prepare(str(disk)) == ""
    assert names(disk) == []
