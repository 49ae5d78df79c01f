"""The errand that makes a host's copy of the working tree, on a real agent: what it sends for, and what it leaves when it is broken off."""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands.sync import PART
from hvlaunch.agent.errands.sync.peers import part_numbers
from hvlaunch.driver.links.errands import Errand
from hvlaunch.sync import delivery as module
from hvlaunch.sync.snapshot import TreeSnapshot, take_snapshot
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import AgentProcess, interpreter

GB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    (path / "sub").mkdir(parents=True)
    (path / "sub/train.py").write_text("print(1)\n")
    (path / "run.sh").write_text("#!/bin/sh\n")
    (path / "run.sh").chmod(0o755)
    (path / "empty").mkdir()
    (path / "none").touch()
    (path / "also-none").touch()
    (path / "link").symlink_to("sub/train.py")
    (path / "large").write_bytes(os.urandom(PART + 10) * 2)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are; agents of the test have it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "on-host"))
    return tmp_path / "on-host/hvlaunch/trees"


class Host:
    """An agent, and copies on its host as a driver makes them."""

    def __init__(self, agent: AgentProcess, root: Path, cache: Path) -> None:
        self.rig = ErrandRig(agent)
        self._root = root
        self._cache = cache

    def snapshot(self) -> TreeSnapshot:
        self._cache.mkdir(mode=0o700, exist_ok=True)
        return take_snapshot(str(self._root), self._cache, GB)

    def start(self, snapshot: TreeSnapshot) -> Errand:
        arguments = {"project": snapshot.name, "hash": snapshot.hash, "peer": None}
        return self.rig.errands.start("sync", arguments, module._LIMITS)

    def line(self, errand: Errand) -> bytes:
        """What the errand asks for; empty at its end."""
        line = b""
        while not line.endswith(b"\n"):
            self.rig.pump()
            data = errand.read(0.0)
            if data == b"":
                return b""
            line += data or b""
        return line.strip()

    def copy(self, answer: Callable[[Errand, TreeSnapshot, bytes], None] | None = None) -> dict[str, Any]:
        """Make a copy of the tree as it is now; return the errand's result."""
        with closing(self.snapshot()) as snapshot:
            errand = self.start(snapshot)
            while line := self.line(errand):
                (answer or answer_it)(errand, snapshot, line)
            result: dict[str, Any] = self.rig.result(errand)
            return result


def answer_it(errand: Errand, snapshot: TreeSnapshot, line: bytes) -> None:
    word, _, ranges = line.partition(b" ")
    if word == b"manifest":
        errand.write(len(snapshot.manifest).to_bytes(4, "big") + snapshot.manifest)
    elif word == b"parts":
        errand.write(b'{"from":[]}\n')
        for number in part_numbers(ranges.decode(), len(snapshot.numbered)):
            data = snapshot.read(number)
            errand.write(len(data).to_bytes(4, "big") + data)
    elif word == b"ready":
        errand.close_input()


@pytest.fixture
def host(home: Path, launch: Any, root: Path, tmp_path: Path) -> Host:
    agent = launch()
    agent.hello()
    return Host(agent, root, tmp_path / "cache")


def tree_of(path: Path) -> dict[str, object]:
    """All there is below a directory."""
    found: dict[str, object] = {}
    for entry in sorted(path.rglob("*")):
        name = str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = str(entry.readlink())
        elif entry.is_dir():
            found[name] = None
        else:
            found[name] = entry.read_bytes(), bool(entry.stat().st_mode & 0o100)
    return found


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_copy_is_the_tree(home: Path, launch: Any, root: Path, tmp_path: Path, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    host = Host(agent, root, tmp_path / "cache")
    result = host.copy()
    copy = Path(result["directory"])
    assert copy.is_relative_to(home)
    assert tree_of(copy) == tree_of(root)
    assert result["received"] == PART + 10 + PART + 10 - (PART - 10) or result["received"] > PART
    assert host.copy() == {"directory": str(copy), "received": 0}
    assert agent.bye()[0] == {"type": "bye", "left": 0, "pids": []}


def test_only_what_is_missing_is_sent(host: Host, root: Path) -> None:
    copy = Path(host.copy()["directory"])
    (root / "sub/train.py").write_text("print(2)\n")
    assert host.copy() == {"directory": str(copy), "received": 9}
    # Content that the host has in another place.
    (root / "large").rename(root / "sub/renamed")
    (root / "again").write_bytes((root / "sub/renamed").read_bytes())
    shutil.rmtree(root / "empty")
    (root / "link").unlink()
    (root / "run.sh").chmod(0o644)
    assert host.copy() == {"directory": str(copy), "received": 0}
    assert tree_of(copy) == tree_of(root)


def test_files_of_jobs_stay_and_changed_ones_are_mended(host: Host, root: Path) -> None:
    copy = Path(host.copy()["directory"])
    (copy / "out").mkdir()
    (copy / "out/model.pt").write_text("weights")
    (copy / "sub/train.py").write_text("print(3)\n")
    (copy / "none").unlink()
    shutil.rmtree(copy / "empty")
    (copy / "link").unlink()
    (copy / "link").symlink_to("/etc")
    assert Path(host.copy()["directory"]) == copy
    assert tree_of(copy) == {**tree_of(root), "out": None, "out/model.pt": (b"weights", False)}


def test_a_file_takes_the_place_of_a_directory_and_back(host: Host, root: Path) -> None:
    copy = Path(host.copy()["directory"])
    shutil.rmtree(root / "sub")
    (root / "sub").write_text("a file now")
    (root / "none").unlink()
    (root / "none").mkdir()
    (root / "none/x").touch()
    assert Path(host.copy()["directory"]) == copy
    assert tree_of(copy) == tree_of(root)


def test_a_job_never_loses_the_copy_that_it_uses(launch: Any, host: Host, root: Path, tmp_path: Path) -> None:
    first = Path(host.copy()["directory"])
    before = tree_of(first)
    (root / "sub/train.py").write_text("print(2)\n")
    agent = launch()
    agent.hello()
    other = Host(agent, root, tmp_path / "cache")
    second = Path(other.copy()["directory"])
    assert second != first
    assert (tree_of(first), tree_of(second)) == (before, tree_of(root))
    # The same tree again is the same copy, and a copy that is free is used again.
    third = launch()
    third.hello()
    assert Path(Host(third, root, tmp_path / "cache").copy()["directory"]) == second
    host.rig.agent.bye()
    (root / "sub/train.py").write_text("print(3)\n")
    assert Path(other.copy()["directory"]) == first
    assert tree_of(first) == tree_of(root)
    for one in (agent, third):
        one.bye()


@pytest.mark.parametrize("cut", range(5))
def test_a_copy_that_was_broken_off_does_not_count(host: Host, root: Path, cut: int) -> None:
    """Killed before the list of files, before the content, in the middle of a part, between two files, at the end."""
    copy = Path(host.copy()["directory"])
    (root / "large").write_bytes(os.urandom(2 * PART))
    (root / "small").write_text("new")
    (root / "run.sh").unlink()
    with closing(host.snapshot()) as snapshot:
        errand = host.start(snapshot)
        if cut:
            answer_it(errand, snapshot, host.line(errand))
        if cut > 1:
            numbers = part_numbers(host.line(errand).split()[1].decode(), len(snapshot.numbered))
            errand.write(b'{"from":[]}\n')
            for number in numbers[: cut - 1]:
                data = snapshot.read(number)
                words = len(data).to_bytes(4, "big") + data
                errand.write(words[:PART] if cut == 2 else words)
        if cut == 3:
            incoming = copy.parents[1] / "incoming"
            host.rig.until(
                lambda: [path for path in incoming.iterdir() if path.suffix != ".part"], "a whole file"
            )
        errand.stop()
        host.rig.until(lambda: errand.has_ended, "its end")
    result = host.copy()
    assert result["directory"] == str(copy)
    assert tree_of(copy) == tree_of(root)
    if cut == 3:
        assert result["received"] == len("new"), "a file that had come does not come again"


def test_damaged_content_fails_the_errand_and_not_the_next_one(host: Host, root: Path) -> None:
    def damage(errand: Errand, snapshot: TreeSnapshot, line: bytes) -> None:
        if line == b"manifest":
            answer_it(errand, snapshot, line)
        else:
            errand.write(b'{"from":[]}\n' + (3).to_bytes(4, "big") + b"bad")

    with closing(host.snapshot()) as snapshot:
        errand = host.start(snapshot)
        while line := host.line(errand):
            damage(errand, snapshot, line)
        assert host.rig.failure(errand) == ("raised", "ValueError: a part of a file was damaged on its way")
    assert tree_of(Path(host.copy()["directory"])) == tree_of(root)


def test_another_list_of_files_is_refused(host: Host) -> None:
    with closing(host.snapshot()) as snapshot:
        arguments = {"project": snapshot.name, "hash": "0" * 64, "peer": None}
        errand = host.rig.errands.start("sync", arguments, module._LIMITS)
        answer_it(errand, snapshot, host.line(errand))
        assert host.rig.failure(errand) == ("raised", "ValueError: the list of files is damaged")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b"])
def test_a_name_that_leads_elsewhere_is_refused(host: Host, name: str) -> None:
    errand = host.rig.errands.start("sync", {"project": name, "hash": "0" * 64, "peer": None}, module._LIMITS)
    assert host.rig.failure(errand) == ("raised", "ValueError: no name of a project")


def test_a_cache_that_others_can_write_to_is_refused(host: Host, home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    with closing(host.snapshot()) as snapshot:
        reason, cause = host.rig.failure(host.start(snapshot))
    assert reason == "raised"
    assert cause == f"PermissionError: {home}: other users can write there, or it is not yours"
