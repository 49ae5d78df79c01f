"""A job's own directory: who can use it, what it costs a job that can have none, and what stays of it."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hvlaunch import outside
from hvlaunch.outside import (
    CONTROL,
    LOCK,
    RESULT,
    JobDirectory,
    NoJobDirectory,
    has_driver,
    has_minder,
    jobs_directory,
    take_lock,
)

ABOUT = {"id": "0123456789ab", "command": ["true"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state/hvlaunch/jobs"


def test_where_jobs_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    usual = Path("/home/ada/.local/state/hvlaunch/jobs")
    assert jobs_directory({}) == usual
    assert jobs_directory({"XDG_STATE_HOME": "relative"}) == usual
    assert jobs_directory({"XDG_STATE_HOME": "/var/state"}) == Path("/var/state/hvlaunch/jobs")


def test_it_is_for_this_user_alone_and_goes_with_the_job(root):
    directory = JobDirectory(root, "0123456789ab", ABOUT)
    directory.listen().close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (directory.path, *directory.path.iterdir())}
    assert modes == {"0123456789ab": 0o700, LOCK: 0o600, "about.json": 0o600, CONTROL: 0o600}
    directory.close()
    assert not list(root.iterdir())


def test_what_is_kept_has_no_socket(root):
    directory = JobDirectory(root, "0123456789ab", ABOUT)
    directory.listen().close()
    directory.keep({"exit_code": 3})
    directory.close()
    assert sorted(path.name for path in directory.path.iterdir()) == ["about.json", "lock", "result.json"]


def test_a_path_that_is_too_long_for_a_socket(tmp_path):
    root = tmp_path / ("long" * 30) / "jobs"
    directory = JobDirectory(root, "0123456789ab", ABOUT)
    listener = directory.listen()
    descriptor = os.open(directory.path, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"/proc/self/fd/{descriptor}/{CONTROL}")
    os.close(descriptor)
    listener.close()
    directory.close()


def _file_in_the_way(root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("")


def _everybodys(root: Path) -> None:
    root.mkdir(parents=True)
    root.chmod(0o777)


def _same_job(root: Path) -> None:
    (root / "0123456789ab").mkdir(parents=True)
    (root / "0123456789ab/x").write_text("")


@pytest.mark.parametrize("prepare", [_file_in_the_way, _everybodys, _same_job])
def test_there_can_be_none(root, prepare):
    prepare(root)
    with pytest.raises(NoJobDirectory):
        JobDirectory(root, "0123456789ab", ABOUT)


def test_of_one_that_can_not_be_written_nothing_stays(root, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fcntl.flock", full)
    with pytest.raises(NoJobDirectory, match="no space left"):
        JobDirectory(root, "0123456789ab", ABOUT)
    assert not list(root.iterdir())


def test_how_a_job_ended_has_room_on_a_disk_that_is_full(root, monkeypatch):
    directory = JobDirectory(root, "0123456789ab", ABOUT)
    directory.reserve()
    [reserved] = root.rglob("result.json.part")
    blocks = reserved.stat().st_size
    monkeypatch.setattr(os, "open", _without_new_files(os.open))
    directory.keep({"exit_code": 3})
    monkeypatch.undo()
    assert json.loads((directory.path / RESULT).read_text()) == {"exit_code": 3}
    assert (directory.path / RESULT).stat().st_size < blocks
    directory.close()


def test_a_disk_that_is_full_does_not_keep_another_driver_from_a_job(root, monkeypatch):
    killed = JobDirectory(root, "0123456789ab", ABOUT)
    killed.reserve()
    os.close(killed._lock)
    monkeypatch.setattr(os, "open", _without_new_files(os.open))
    directory = JobDirectory.adopt(killed.path)
    directory.reserve()
    directory.keep({"exit_code": 3})
    monkeypatch.undo()
    assert json.loads((directory.path / RESULT).read_text()) == {"exit_code": 3}
    directory.close()


def _without_new_files(real):
    def open_known(path, flags, *rest, **options):
        if flags & os.O_CREAT and not os.path.exists(path):  # noqa: PTH110 (it may open files by what it gets)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *rest, **options)

    return open_known


def test_who_begins_sees_whether_there_is_a_driver(root):
    assert not has_driver(root / "0123456789ab")
    directory = JobDirectory(root, "0123456789ab", ABOUT)
    directory.keep({"exit_code": 0})
    assert has_driver(directory.path)
    directory.close()
    assert not has_driver(directory.path)


def test_minder_stopped_as_its_driver_dies_does_not_keep_a_successor_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = take_lock(tmp_path / LOCK, os.O_CREAT)
    started: list[subprocess.Popen[bytes]] = []
    start = outside.start_process
    monkeypatch.setattr(
        outside, "start_process", lambda *args, **options: started.append(start(*args, **options))
    )
    outside.start_minder(tmp_path)
    (process,) = started
    # It is at its work once it has loaded what it needs.
    time.sleep(0.5)
    # On this processor, and only if nothing else needs it: so it learns of both events at once.
    before = os.sched_getaffinity(0)
    for pid in (0, process.pid):
        os.sched_setaffinity(pid, {min(before)})
    os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
    try:
        os.close(lock)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        os.close(take_lock(tmp_path / LOCK))
        assert has_minder(tmp_path)
    finally:
        os.sched_setaffinity(0, before)
        process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0  # the directory has no job


def test_stopped_client_is_not_taken_for_a_driver(tmp_path: Path) -> None:
    looking = os.open(tmp_path / LOCK, os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(looking, fcntl.LOCK_SH)
    tmp_path.chmod(0o700)
    with pytest.raises(NoJobDirectory, match="checking whether the job has a driver is stopped"):
        JobDirectory.adopt(tmp_path)
    os.close(looking)
