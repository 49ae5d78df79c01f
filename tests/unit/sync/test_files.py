"""Lists of files, and their places: what a directory gives, and how a copy of it appears."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvlaunch.agent.errands import offer
from hvlaunch.agent.errands.bring import Destination
from hvlaunch.agent.errands.offer import leads_out, list_files
from hvlaunch.agent.errands.sync.content import Manifest
from hvlaunch.errors import BadUsage
from hvlaunch.sync.files import LocalFiles

GB = 1 << 30


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    (path / "out/deep").mkdir(parents=True)
    (path / "out/a.pt").write_bytes(b"a")
    (path / "out/deep/b.pt").write_bytes(b"bb")
    (path / "out/.hidden.pt").write_bytes(b"h")
    (path / "x.log").write_bytes(b"")
    (path / "in").symlink_to("out")
    return path


def paths(root: Path, *globs: str) -> list[str]:
    return [entry[1] for entry in list_files(str(root), globs, GB, 1000).entries if entry[0] != "d"]


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        ("out/*.pt", ["out/a.pt"]),
        ("**/*.pt", ["out/a.pt", "out/deep/b.pt"]),
        ("out", ["out/.hidden.pt", "out/a.pt", "out/deep/b.pt"]),
        ("out/**", ["out/a.pt", "out/deep/b.pt"]),
        ("*.log", ["x.log"]),
        ("in/*.pt", ["in/a.pt"]),  # a link that the user names is followed
        ("*/a.pt", ["out/a.pt"]),  # one that a pattern matches is not
        ("i*", ["in"]),
        ("[ab].pt", []),
        ("nothing/*", []),
    ],
)
def test_patterns_match_as_in_a_shell(root: Path, glob: str, matches: list[str]) -> None:
    assert paths(root, glob) == matches


@pytest.mark.parametrize("glob", ["../x", "/etc/passwd", "a/../../b", ""])
def test_a_pattern_stays_below_the_directory(root: Path, glob: str) -> None:
    with pytest.raises(ValueError, match="does not name files below"):
        paths(root, glob)


def test_what_can_not_be_copied_is_skipped_or_an_error(root: Path) -> None:
    (root / "out/evil").symlink_to("/etc/passwd")
    (root / "out/bad\nname").write_text("")
    os.mkfifo(root / "out/pipe")
    listing = list_files(str(root), ["out"], GB, 1000)
    assert sorted(path for path, _ in listing.skipped) == ["out/bad\nname", "out/evil", "out/pipe"]
    with pytest.raises(BadUsage, match=r"evil|bad|pipe"):
        LocalFiles(str(root / "out"))


def test_limits_name_the_largest(root: Path) -> None:
    with pytest.raises(ValueError, match=r"more than the limit of 0\.0 MB; the largest: out/deep/b\.pt"):
        list_files(str(root), ["**"], 2, 1000)
    with pytest.raises(ValueError, match="more than 2 files"):
        list_files(str(root), ["**"], GB, 2)


def test_large_files_are_read_again_only_after_a_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer, "LARGE", 0)
    monkeypatch.setattr(offer, "_QUIET", 0.0)
    first = LocalFiles(str(root / "out")).hash
    monkeypatch.setattr(offer, "_sum", lambda *_: pytest.fail("read again"))
    assert LocalFiles(str(root / "out")).hash == first
    monkeypatch.undo()
    (root / "out/a.pt").write_bytes(b"b")
    assert LocalFiles(str(root / "out")).hash != first


def test_a_file_that_changes_later_is_an_error(root: Path) -> None:
    files = LocalFiles(str(root / "out"))
    (root / "out/a.pt").write_bytes(b"z")
    changed = files.numbered.index(sha(b"a"))
    with pytest.raises(OSError, match="was changed while it was copied"):
        files.read(changed)


@pytest.mark.parametrize(
    ("path", "target", "leads"),
    [
        ("l", "a", False),
        ("d/l", "../a", False),
        ("l", "../a", True),
        ("d/l", "../../a", True),
        ("l", "/a", True),
        ("l", "a/../../b", True),
        ("l", "a/..", True),  # `a` may be a link
        ("l", "", True),
    ],
)
def test_a_link_stays_inside(path: str, target: str, leads: bool) -> None:
    assert leads_out(path, target) == leads


@pytest.fixture
def manifest() -> Iterator[Manifest]:
    words = json.dumps([["d", "s"], ["f", "s/a", 0o644, 0, []]]).encode()
    yield Manifest(words, sha(words))


def test_a_new_directory_appears_whole(tmp_path: Path, manifest: Manifest) -> None:
    with Destination(str(tmp_path / "new"), manifest, is_file=False) as place:
        place.writer()
        assert not (tmp_path / "new").exists()
        place.install()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a"]


def test_a_directory_is_not_replaced_by_a_file(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "d/s/a").mkdir(parents=True)
    with (
        Destination(str(tmp_path / "d"), manifest, is_file=False) as place,
        pytest.raises(IsADirectoryError, match="is a directory, and a file would replace it"),
    ):
        place.writer()


def test_a_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(BadUsage, match="is neither a file nor a directory"):
            LocalFiles(str(tmp_path / "s"))
