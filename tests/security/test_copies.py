"""Copies of the project on hosts: what other users of a host, and hostile repositories, can do about them."""

import os
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.agent.errands.sync.content import Manifest
from hvlaunch.sync.snapshot import TreeSnapshot, take_snapshot
from tests.unit.agent.test_sync import GB, Host, home, host, refusal, root, tree_of

__all__ = ["home", "host", "root"]

Give = Callable[[Path], Path]


def theirs(home: Path, host: Host, name: str) -> Path:
    """A place in the cache of a host with a copy: `.` is the cache of all programs."""
    if name in ("project", "copy", "tree"):
        copy = Path(host.copy()["directory"])
        return {"tree": copy, "copy": copy.parent, "project": copy.parent.parent}[name]
    path = home.parent.parent / name
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("name", [".", "hvlaunch", "hvlaunch/trees", "project", "copy", "tree"])
def test_a_cache_that_every_user_can_write_to_is_refused(home: Path, host: Host, name: str) -> None:
    path = theirs(home, host, name)
    path.chmod(0o777)
    before = tree_of(home)
    assert refusal(host).startswith("PermissionError: ")
    assert tree_of(home) == before


@pytest.mark.parametrize("name", ["hvlaunch", "hvlaunch/trees", "project", "copy", "tree"])
def test_a_cache_of_another_user_is_refused(home: Path, host: Host, given_to_bob: Give, name: str) -> None:
    path = given_to_bob(theirs(home, host, name))
    before = tree_of(home)
    assert refusal(host) == f"PermissionError: {path}: other users can write there, or it is not yours"
    assert tree_of(home) == before


@pytest.mark.parametrize("name", ["hvlaunch", "hvlaunch/trees", "project", "copy", "tree"])
def test_a_link_in_place_of_a_cache_is_not_followed(
    home: Path, host: Host, tmp_path: Path, name: str
) -> None:
    """Another user has put the link while the directory was open to all; it leads to this user's own files."""
    path = theirs(home, host, name)
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "train.py").write_text("three years")
    path.rename(tmp_path / "moved")
    path.symlink_to(precious)
    assert refusal(host).startswith("PermissionError: ")
    assert tree_of(precious) == {"train.py": (b"three years", False)}


@pytest.mark.parametrize("planted", ["file", "part", "link"])
def test_content_that_was_planted_among_the_incoming_is_not_used(
    host: Host, root: Path, tmp_path: Path, planted: str
) -> None:
    """Its name is right, and its bytes are not. A link is not written through."""
    copy = Path(host.copy()["directory"])
    (root / "sub/train.py").write_text("print('new')\n")
    incoming = copy.parents[1] / "incoming"
    incoming.mkdir()
    with closing(host.snapshot()) as snapshot:
        [content] = [file.content for file in manifest_of(snapshot).files if file.path == "sub/train.py"]
    precious = tmp_path / "precious"
    precious.write_text("print('mad')\n")
    if planted == "link":
        (incoming / content).symlink_to(precious)
        (incoming / f"{content}.part").symlink_to(precious)
        assert "Too many levels of symbolic links" in refusal(host)
    else:
        (incoming / (content + ".part" * (planted == "part"))).write_text("print('mad')\n")
        assert tree_of(Path(host.copy()["directory"])) == tree_of(root)
    assert precious.read_text() == "print('mad')\n"


def manifest_of(snapshot: TreeSnapshot) -> Manifest:
    return Manifest(zlib.decompress(snapshot.manifest), snapshot.hash)


def test_a_worker_can_not_lead_the_next_copy_elsewhere(host: Host, root: Path, tmp_path: Path) -> None:
    """It has put links in place of a directory and a file of the project."""
    copy = Path(host.copy()["directory"])
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "train.py").write_text("three years")
    (copy / "sub/train.py").unlink()
    (copy / "sub").rmdir()
    (copy / "sub").symlink_to(precious)
    (copy / "none").unlink()
    (copy / "none").symlink_to(precious / "train.py")
    (root / "sub/train.py").write_text("print(2)\n")
    (root / "none").write_text("content")
    assert tree_of(Path(host.copy()["directory"])) == tree_of(root)
    assert tree_of(precious) == {"train.py": (b"three years", False)}


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (".gitignore", "my.env"),
        (".hvlaunchignore", "my.env"),
        ("sub/.gitignore", "sub/my.env"),
        ("../home/.config/git/ignore", "sub/deep/my.env"),
    ],
)
def test_no_byte_and_no_name_of_an_ignored_file_is_in_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str, name: str
) -> None:
    """Nor what is kept for the next one. A link to the secret is copied as a link."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    root, cache = tmp_path / "project", tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for path in (root / rules, root / name, root / "train.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
    (root / rules).write_text("*.env\n")
    (root / name).write_text("password=TOP-SECRET")
    (root / "train.py").write_text("print(1)")
    (root / "link").symlink_to(name)
    with closing(take_snapshot(str(root), cache, GB)) as snapshot:
        sent = zlib.decompress(snapshot.manifest)
        sent += b"".join(map(snapshot.read, range(len(snapshot.numbered))))
        assert manifest_of(snapshot).links == {"link": name}
    assert b"print(1)" in sent
    kept = b"".join(path.read_bytes() for path in cache.rglob("*") if path.is_file())
    for data in (sent, kept):
        assert b"TOP-SECRET" not in data
        assert f'"f","{name}"'.encode() not in data


def test_a_file_that_is_ignored_now_is_removed_from_hosts(host: Host, root: Path) -> None:
    (root / "my.env").write_text("password")
    copy = Path(host.copy()["directory"])
    assert (copy / "my.env").exists()
    (root / ".gitignore").write_text("*.env\n")
    assert Path(host.copy()["directory"]) == copy
    assert not (copy / "my.env").exists()
    assert os.listdir(copy / "sub") == ["train.py"]  # noqa: PTH208 (names alone)
