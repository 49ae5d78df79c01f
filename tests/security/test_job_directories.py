"""The directories of jobs and pools, where another user of the machine has put something or can do so."""

import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from hvlaunch.cli.jobs import run_job_command
from hvlaunch.console.files import JobFolder
from hvlaunch.driver.worker_files import make_output_directory
from hvlaunch.errors import BadUsage
from hvlaunch.outside import JobDirectory, KnownJob, NoJobDirectory, jobs_directory, known_jobs, prune, remove
from hvlaunch.outside.control import ControlClient, DriverGone
from hvlaunch.outside.pools import known_pools
from hvlaunch.owners import make_own_directory, peer_is_own
from tests.security.conftest import BOB

Give = Callable[[Path], Path]

ID = "0123456789ab"
LONG_AFTER = 4e9
"""A time at which everything is old."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of jobs; it exists."""
    root = jobs_directory({"XDG_STATE_HOME": str(tmp_path)})
    make_own_directory(str(root))
    return root


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A directory of this user's that looks like one of an ended job."""
    precious = tmp_path / "precious"
    precious.mkdir(0o700)
    (precious / "about.json").write_text('{"began": 1}')
    (precious / "thesis.tex").write_text("three years")
    return precious


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def make_job(root: Path, name: str = ID) -> Path:
    with closing(JobDirectory(root, name, {"id": name, "began": 1.0})) as directory:
        directory.keep({"exit_code": 1})
    return root / name


def shared_group() -> int:
    """Return a group of several users that this user may give files to."""
    if os.getuid() != 0:
        pytest.skip("only root can give files to any group")
    return BOB


def is_whole(precious: Path) -> bool:
    return {path.name for path in precious.iterdir()} == {"about.json", "thesis.tex"}


@pytest.mark.parametrize("name", [ID, f".{ID}", "any"])
def test_prune_follows_no_link_among_the_jobs(root: Path, precious: Path, name: str) -> None:
    (root / name).symlink_to(precious)
    prune(root, LONG_AFTER)
    assert is_whole(precious)
    assert known_jobs(root) == []


@pytest.mark.parametrize("word", ["jobs", "logs", "wait", "forget"])
def test_job_words_follow_no_link_among_the_jobs(root: Path, precious: Path, word: str) -> None:
    (root / ID).symlink_to(precious)
    with suppress(BadUsage):
        run_job_command([word, *[ID] * (word != "jobs")], {"XDG_STATE_HOME": str(root.parent.parent)})
    assert is_whole(precious)


def test_remove_follows_no_link(root: Path, precious: Path) -> None:
    (root / ID).symlink_to(precious)
    with pytest.raises(OSError, match=r"(?i)not a directory"):
        remove(root / ID)
    assert is_whole(precious)


def test_hidden_directories_of_others_kinds_are_not_pruned(root: Path) -> None:
    """A planted link in place of the jobs' directory, or of a parent, may lead to a repository."""
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    prune(root, LONG_AFTER)
    assert (root / ".git" / "HEAD").exists()


def test_abandoned_directories_are_pruned(root: Path) -> None:
    (root / f".{ID}").mkdir()
    (root / f".{ID}" / "lock").touch()
    prune(root, LONG_AFTER)
    assert not any(root.iterdir())


def test_a_hard_link_in_a_jobs_directory_loses_its_name_alone(root: Path, precious: Path) -> None:
    os.link(precious / "thesis.tex", make_job(root) / "thesis.tex")
    prune(root, LONG_AFTER)
    assert not any(root.iterdir())
    assert is_whole(precious)


@pytest.mark.parametrize("mode", [0o770, 0o777])
def test_job_directories_that_others_can_write_to_are_ignored(root: Path, mode: int) -> None:
    make_job(root).chmod(mode)
    if mode == 0o770:
        os.chown(root / ID, -1, shared_group())
    prune(root, LONG_AFTER)
    assert known_jobs(root) == []
    assert (root / ID / "about.json").exists()


def test_job_directories_of_another_user_are_ignored(root: Path, given_to_bob: Give) -> None:
    given_to_bob(make_job(root))
    prune(root, LONG_AFTER)
    assert known_jobs(root) == []
    assert (root / ID / "about.json").exists()


def test_pools_of_another_user_are_ignored(root: Path, given_to_bob: Give) -> None:
    make_job(root, "train")
    assert [pool.name for pool in known_pools(root)] == ["train"]
    given_to_bob(root / "train")
    assert known_pools(root) == []


@pytest.mark.parametrize("place", ["jobs", "hvlaunch"])
@pytest.mark.parametrize("is_link", [False, True], ids=["directory", "link"])
def test_another_users_jobs_are_refused_with_their_place(
    root: Path, given_to_bob: Give, place: str, is_link: bool
) -> None:
    make_job(root)
    path = root if place == "jobs" else root.parent
    if is_link:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    given_to_bob(path)
    with pytest.raises(NoJobDirectory, match=f"{path}: it belongs to user {BOB}"):
        run_job_command(["jobs"], {"XDG_STATE_HOME": str(root.parent.parent)})
    prune(root, LONG_AFTER)
    assert (root / ID / "about.json").exists()


@pytest.mark.parametrize("place", ["jobs", "hvlaunch"])
def test_jobs_that_a_group_can_replace_are_refused(root: Path, place: str) -> None:
    path = root if place == "jobs" else root.parent
    os.chown(path, -1, shared_group())
    path.chmod(0o775)
    for act in (lambda: JobDirectory(root, ID, {}), lambda: known_jobs(root), lambda: known_pools(root)):
        with pytest.raises(NoJobDirectory, match=f"{path}: group .* can change it .mode 775.") as raised:
            act()
        assert "chmod go-w" in str(raised.value)


def test_a_users_own_link_to_another_disk_is_followed(root: Path) -> None:
    root.parent.rename(root.parent.with_name("disk"))
    root.parent.symlink_to(root.parent.with_name("disk"))
    make_job(root)
    assert [job.id for job in known_jobs(root)] == [ID]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_all_directories_that_are_made_are_private(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        make_own_directory(str(tmp_path / "a" / "b" / "c"))
    for path in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0o000, 0o002])
def test_parents_of_the_output_are_private(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        make_output_directory(tmp_path / "logs" / "today")
    for path in (tmp_path / "logs", tmp_path / "logs" / "today"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["new", "new/er", "mine"])
def test_a_parent_that_every_user_can_write_to_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "mine").mkdir(0o700)
    (tmp_path / "all").chmod(0o777)
    with pytest.raises(PermissionError, match="every user of this machine can make files in it") as raised:
        make_own_directory(str(tmp_path / "all" / name))
    assert raised.value.filename == str(tmp_path / "all")
    (tmp_path / "all").chmod(0o1777)  # as /tmp
    make_own_directory(str(tmp_path / "all" / name))


def test_a_parent_that_is_another_users_link_is_refused(tmp_path: Path, given_to_bob: Give) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    given_to_bob(tmp_path / "link")
    with pytest.raises(PermissionError, match=f"it belongs to user {BOB}"):
        make_own_directory(str(tmp_path / "link" / "new"))
    assert not any((tmp_path / "mine").iterdir())


def test_a_directory_that_appears_meanwhile_is_refused_if_it_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for missing parents and their making."""
    mkdir = os.mkdir

    def late(name: str, mode: int, *, dir_fd: int | None = None) -> None:
        monkeypatch.setattr(os, "mkdir", mkdir)
        (tmp_path / "theirs").mkdir()
        (tmp_path / "a").symlink_to(tmp_path / "theirs")
        mkdir(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", late)
    with pytest.raises(OSError, match=r"(?i)not a directory"):
        make_own_directory(str(tmp_path / "a" / "b"))
    assert not any((tmp_path / "theirs").iterdir())


def test_output_goes_to_no_directory_of_another_user(tmp_path: Path, given_to_bob: Give) -> None:
    """The owner of the parent may have replaced the directory since it was checked."""
    (tmp_path / "out").mkdir()
    given_to_bob(tmp_path / "out")
    with pytest.raises(BadUsage, match="not permitted"):
        JobFolder(tmp_path / "out", ID)
    assert not any((tmp_path / "out").iterdir())


_ANSWER_AS_BOB = """\
import os, socket, sys
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
link, _ = listener.accept()
print(link.recv(65536), flush=True)
link.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
"""


def test_another_users_program_gets_no_request_in_place_of_the_driver() -> None:
    """It has taken the socket's name, in a directory that was open to all for a moment."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        with closing(JobDirectory(Path(place) / "hvlaunch", ID, {"began": 1.0})) as directory:
            for path in (directory.path.parent, directory.path):
                path.chmod(0o777)
            with subprocess.Popen(
                [sys.executable, "-I", "-c", _ANSWER_AS_BOB, str(directory.path / "control"), str(BOB)],
                stdout=subprocess.PIPE,
                text=True,
            ) as bob:
                assert bob.stdout is not None
                assert bob.stdout.readline() == "listens\n"
                for path in (directory.path, directory.path.parent):
                    path.chmod(0o700)
                job = KnownJob(ID, directory.path, {"pid": 1}, None, has_driver=True)
                with pytest.raises(DriverGone, match="another user's program answers in place of the driver"):
                    ControlClient(job, patience=5.0).post("/output", {"secret": "x"})
                assert bob.stdout.readline() == "b''\n"


def test_the_peer_of_a_unix_socket_is_known_on_macos_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """By LOCAL_PEERCRED, whose answer begins with a version and the uid."""
    monkeypatch.delattr(socket, "SO_PEERCRED")

    class Peer:
        def __init__(self, uid: int) -> None:
            self.uid = uid

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option, size) == (0, 1, 76)
            return struct.pack("II", 0, self.uid).ljust(size, b"\0")

    assert peer_is_own(Peer(os.getuid()))  # type: ignore[arg-type]
    assert peer_is_own(Peer(0))  # type: ignore[arg-type]
    assert not peer_is_own(Peer(BOB))  # type: ignore[arg-type]
