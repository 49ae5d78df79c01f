"""The errand that makes a host's copy of the working tree, on a real agent: what it sends for, and what it leaves when it is broken off."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from hvlaunch.agent import cache
from hvlaunch.agent.errands.sync import _parts_of
from hvlaunch.agent.errands.sync.content import PART, part_numbers
from hvlaunch.driver.links.errands import Errand
from hvlaunch.sync import delivery as module
from hvlaunch.sync.snapshot import TreeSnapshot, take_snapshot
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import AgentProcess, interpreter

GB = 1 << 30
IN_CACHE: dict[str, Any] = {"to": None, "job": "job", "jobs": None}


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

    def __init__(
        self, agent: AgentProcess, root: Path, cache: Path, *, to: str | None = None, job: str = "job"
    ) -> None:
        self.rig = ErrandRig(agent)
        self.more = {**IN_CACHE, "to": to, "job": job}
        self._root = root
        self._cache = cache
        self.home = Path(os.environ["XDG_CACHE_HOME"], "hvlaunch/trees")

    def snapshot(self) -> TreeSnapshot:
        self._cache.mkdir(mode=0o700, exist_ok=True)
        return take_snapshot(str(self._root), self._cache, GB)

    def start(self, snapshot: TreeSnapshot) -> Errand:
        arguments = {"project": snapshot.name, "hash": snapshot.hash, "peer": None, **self.more}
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


def test_without_a_change_nothing_is_asked_for(host: Host, root: Path, home: Path) -> None:
    copy = Path(host.copy()["directory"])
    (copy / "out").write_text("an output")
    asked: list[bytes] = []

    def note(errand: Errand, snapshot: TreeSnapshot, line: bytes) -> None:
        asked.append(line)
        answer_it(errand, snapshot, line)

    host.copy(note)
    # The index is for changes alone.
    (home / copy.relative_to(home).parts[0] / "0/index.json").write_text("damaged")
    host.copy(note)
    assert [line.partition(b" ")[0] for line in asked] == [b"ready", b"ready"]


@pytest.mark.parametrize("damaged", ["paths.json", "statuses"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "other"])
def test_a_copy_with_damaged_lists_is_compared_anew(
    host: Host, root: Path, home: Path, damaged: str, damage: str
) -> None:
    """A worker may write there, and earlier versions of hvlaunch have no such lists."""
    copy = Path(host.copy()["directory"])
    (file,) = home.rglob(damaged)
    whole = file.read_bytes()
    (copy / "sub/train.py").write_text("print(3)\n")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "other": b"[1,2,3,4]"}[damage])
    assert Path(host.copy()["directory"]) == copy
    assert tree_of(copy) == tree_of(root)
    assert file.read_bytes() != b""


def test_the_lists_of_another_version_of_the_tree_do_not_count(host: Host, root: Path, home: Path) -> None:
    copy = Path(host.copy()["directory"])
    lists = {name: next(home.rglob(name)).read_bytes() for name in ("paths.json", "statuses")}
    (root / "new").write_text("1")
    host.copy()
    # An earlier hvlaunch has changed the copy, and not the lists.
    for name, content in lists.items():
        next(home.rglob(name)).write_bytes(content)
    (copy / "new").write_text("2")
    host.copy()
    assert tree_of(copy) == tree_of(root)


def test_a_link_that_leads_elsewhere_is_mended(host: Host, root: Path) -> None:
    copy = Path(host.copy()["directory"])
    (copy / "link").unlink()
    (copy / "link").symlink_to("/etc")
    assert Path(host.copy()["directory"]) == copy
    assert tree_of(copy) == tree_of(root)


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
        arguments = {"project": snapshot.name, "hash": "0" * 64, "peer": None, **IN_CACHE}
        errand = host.rig.errands.start("sync", arguments, module._LIMITS)
        answer_it(errand, snapshot, host.line(errand))
        assert host.rig.failure(errand) == ("raised", "ValueError: the list of files is damaged")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b"])
def test_a_name_that_leads_elsewhere_is_refused(host: Host, name: str) -> None:
    arguments = {"project": name, "hash": "0" * 64, "peer": None, **IN_CACHE}
    errand = host.rig.errands.start("sync", arguments, module._LIMITS)
    assert host.rig.failure(errand) == ("raised", "ValueError: no name of a project")


def test_a_cache_that_others_can_write_to_is_refused(host: Host, home: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    with closing(host.snapshot()) as snapshot:
        reason, cause = host.rig.failure(host.start(snapshot))
    assert reason == "raised"
    assert cause == f"PermissionError: {home}: other users can write there, or it is not yours"


def test_a_large_file_continues_behind_its_last_part(host: Host, root: Path) -> None:
    """Of four parts two have come when the host is killed; the file is named twice, with other parts behind them."""
    parts = [os.urandom(PART) for _ in range(4)]
    (root / "big").write_bytes(b"".join(parts))
    (root / "other").write_bytes(parts[0] + parts[3])
    with closing(host.snapshot()) as snapshot:
        errand = host.start(snapshot)
        answer_it(errand, snapshot, host.line(errand))
        numbers = part_numbers(host.line(errand).split()[1].decode(), len(snapshot.numbered))
        size = sum(map(snapshot.size_of, numbers))
        errand.write(b'{"from":[]}\n')
        for number in numbers[:2]:
            errand.write(snapshot.size_of(number).to_bytes(4, "big") + snapshot.read(number))
        [incoming] = host.home.glob("*/incoming")
        host.rig.until(
            lambda: [file for file in incoming.glob("*.part") if file.stat().st_size >= 2 * PART], "two parts"
        )
        errand.stop()
        host.rig.until(lambda: errand.has_ended, "its end")
    result = host.copy()
    assert result["received"] == size - 2 * PART
    assert tree_of(Path(result["directory"])) == tree_of(root)


def test_of_a_large_file_only_the_parts_that_changed_are_sent(host: Host, root: Path) -> None:
    (root / "large").write_bytes(os.urandom(3 * PART))
    host.copy()
    with (root / "large").open("r+b") as file:
        file.seek(PART + 5)
        file.write(b"other")
    result = host.copy()
    assert result["received"] == PART
    assert tree_of(Path(result["directory"])) == tree_of(root)


def test_sparse_files_stay_sparse(host: Host, root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.seek(8 * PART)
        file.write(b"end")
    copy = Path(host.copy()["directory"])
    assert (copy / "sparse").read_bytes() == (root / "sparse").read_bytes()
    assert (copy / "sparse").stat().st_blocks * 512 < PART


def test_a_name_of_any_form_is_a_files_own(host: Host, root: Path) -> None:
    """Content that two files have in common is copied beside none of them."""
    (root / "a.part").write_text("mine")
    host.copy()
    for name in "ab":
        (root / name).write_text("twice")
    assert tree_of(Path(host.copy()["directory"])) == tree_of(root)


# A fixed place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def at_place(home: Path, launch: Any, root: Path, tmp_path: Path, place: Path) -> Callable[[str], Host]:
    def start(job: str) -> Host:
        agent = launch()
        agent.hello()
        return Host(agent, root, tmp_path / "cache", to=str(place), job=job)

    return start


def without_own(place: Path) -> dict[str, object]:
    return {name: entry for name, entry in tree_of(place).items() if not name.startswith(".hvlaunch")}


def refusal(host: Host) -> str:
    """The cause for which a copy fails."""
    with closing(host.snapshot()) as snapshot:
        errand = host.start(snapshot)
        while line := host.line(errand):
            answer_it(errand, snapshot, line)
        return host.rig.failure(errand)[1]


def test_a_fixed_place_keeps_what_hvlaunch_has_not_written(
    at_place: Callable[[str], Host], root: Path, place: Path
) -> None:
    """A file beside the project, one that was equal to the project's, and one of the project that was changed there."""
    (place / "sub").mkdir()
    (place / "sub/mine").write_text("notes")
    (place / "run.sh").write_text("#!/bin/sh\n")
    host = at_place("job")
    assert host.copy()["directory"] == str(place)
    assert without_own(place) == {
        **tree_of(root),
        "sub/mine": (b"notes", False),
        "run.sh": (b"#!/bin/sh\n", False),
    }
    assert host.copy()["received"] == 0
    (place / "none").write_text("results")
    (place / "link").unlink()
    (place / "link").symlink_to("sub/mine")
    for name in ("run.sh", "none", "also-none", "sub/train.py"):
        (root / name).unlink()
    (root / "sub").rmdir()
    (root / "link").unlink()
    host.copy()
    assert without_own(place) == {
        **tree_of(root),
        "sub": None,
        "sub/mine": (b"notes", False),
        "run.sh": (b"#!/bin/sh\n", False),
        "none": (b"results", False),
        "link": "sub/mine",
    }


@pytest.mark.parametrize("name", ["none", "sub", "link", "large"])
def test_a_fixed_place_with_another_file_of_the_project_is_refused(
    at_place: Callable[[str], Host], root: Path, place: Path, name: str
) -> None:
    """Also if the file was equal at first: it is the user's nevertheless."""
    (place / name).write_text("mine")
    host = at_place("job")
    assert refusal(host).startswith(f"FileExistsError: {place}/{name} is not from hvlaunch")
    assert without_own(place) == {name: (b"mine", False)}
    (root / "link").unlink()
    shutil.rmtree(root / "sub")
    for path in ("link", "sub", "none", "large"):
        (root / path).write_text("mine")
    host.copy()
    (root / name).write_text("other")
    assert refusal(host).startswith(f"FileExistsError: {place}/{name} is not from hvlaunch")
    assert (place / name).read_text() == "mine"


def test_a_fixed_place_in_use_by_another_job_is_refused(
    at_place: Callable[[str], Host], root: Path, place: Path
) -> None:
    first = at_place("one")
    first.copy()
    other = at_place("two")
    assert refusal(other) == f"BlockingIOError: {place} is in use by another running job"
    (root / "sub/train.py").write_text("print(2)\n")
    assert refusal(other) == f"BlockingIOError: {place} is in use by another running job"
    assert (place / "sub/train.py").read_text() == "print(1)\n"
    assert at_place("one").copy()["directory"] == str(place), "another agent of the same job"
    first.rig.agent.bye()


def test_a_copy_at_a_fixed_place_that_was_broken_off_is_mended(
    at_place: Callable[[str], Host], root: Path, place: Path
) -> None:
    host = at_place("job")
    host.copy()
    (place / "sub/train.py").unlink()
    (place / ".hvlaunch/complete").unlink()
    (root / "run.sh").unlink()
    host.copy()
    assert without_own(place) == tree_of(root)


@pytest.mark.parametrize("words", ["/", ".", "~", "open", "theirs/place", "link"])
def test_places_that_are_nobodys_or_everybodys_are_refused(
    home: Path, launch: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    agent = launch()
    agent.hello()
    cause = refusal(Host(agent, root, tmp_path / "cache", to=words))
    assert cause.startswith("PermissionError: ")
    assert not (tmp_path / ".hvlaunch").exists()


# Old copies


def test_old_copies_go_by_age_and_size_but_copies_of_running_jobs_stay(
    launch: Any, host: Host, root: Path, tmp_path: Path
) -> None:
    """Two jobs use copies of one project; a third copy, and another project, are free."""
    agents = [launch() for _ in range(3)]
    hosts = [host]
    for agent in agents:
        agent.hello()
        hosts.append(Host(agent, root, tmp_path / "cache"))
    copies = []
    for number, user in enumerate(hosts):
        (root / "sub/train.py").write_text(f"print({number})\n")
        copies.append(Path(user.copy()["directory"]).parent)
    shutil.copytree(copies[0].parent, host.home / "another")
    for user in hosts[2:]:
        user.rig.agent.bye()
    before = [tree_of(copy) for copy in copies[:2]]
    for users in (host.home / "another").glob("*/users"):
        shutil.rmtree(users)

    cache.drop_old(str(host.home), _parts_of)
    assert all(copy.exists() for copy in copies), "they are young, and small"
    month_ago = time.time() - 31 * 86400
    for path in [*host.home.rglob("*"), *host.home.iterdir()]:
        os.utime(path, (month_ago, month_ago), follow_symlinks=False)
    os.utime(copies[3] / "users")
    cache.drop_old(str(host.home), _parts_of)
    assert [copy.exists() for copy in copies] == [True, True, False, True]
    assert [path.name for path in host.home.iterdir()] == [copies[0].parent.name]
    cache.drop_old(str(host.home), _parts_of, 0)
    assert [copy.exists() for copy in copies] == [True, True, False, False]
    assert [tree_of(copy) for copy in copies[:2]] == before
    # A new copy takes a free name.
    (root / "sub/train.py").write_text("print(9)\n")
    third = launch()
    third.hello()
    assert Path(Host(third, root, tmp_path / "cache").copy()["directory"]).parent.name == "2"
    third.bye()


def test_a_job_on_another_host_with_the_same_home_keeps_its_copy(host: Host, root: Path) -> None:
    """Its processes are invisible here, and it has run for weeks. The driver knows when it has ended."""
    copy = Path(host.copy()["directory"])
    user = copy.parent / "users/another-boot_1_1"
    user.write_text("long")
    weeks_ago = time.time() - 20 * 86400
    os.utime(user, (weeks_ago, weeks_ago))
    (root / "sub/train.py").write_text("print(2)\n")
    host.more["jobs"] = ["long", "job"]
    second = Path(host.copy()["directory"])
    assert second != copy
    (root / "sub/train.py").write_text("print(3)\n")
    host.more["jobs"] = None
    assert Path(host.copy()["directory"]) == second, "nobody knows the job"
    cache.drop_old(str(host.home), _parts_of, 0)
    assert copy.exists()
    host.more["jobs"] = ["job"]
    (root / "sub/train.py").write_text("print(4)\n")
    assert Path(host.copy()["directory"]) == copy


def test_an_entry_that_is_held_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "p/0").mkdir(parents=True)
    (home / "p/0/size").write_text("100")
    with cache.locked(str(home / "p")):
        cache.drop_old(str(home), _parts_of, 0)
        assert (home / "p/0").exists()
    cache.drop_old(str(home), _parts_of, 0)
    assert not (home / "p/0").exists()


def test_an_entry_that_was_removed_while_another_waited_is_made_anew(home: Path) -> None:
    entry = str(home / "p")
    second = threading.Event()

    def wait() -> None:
        with cache.locked(entry):
            second.set()
            assert Path(entry, "lock").exists()

    with cache.locked(entry):
        thread = threading.Thread(target=wait)
        thread.start()
        assert not second.wait(0.2)
        shutil.rmtree(entry)
    assert second.wait(30.0)
    thread.join()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_copy_that_is_killed_at_random_moments_is_mended_by_the_next(
    host: Host, root: Path, place: Path, fixed: bool
) -> None:
    """Twenty moments between the begin of the errand and its end, with files that come, change and go."""
    random = Random(32)
    if fixed:
        host.more["to"] = str(place)
        (place / "mine").write_text("notes")
    whole = 1.0
    killed = []

    def kill() -> None:
        for process in psutil.Process(host.rig.agent.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "hvl-sync":
                    process.kill()
                    killed.append(process)

    for number in range(21):
        shutil.rmtree(root / "sub")
        (root / "sub").mkdir()
        for name in random.sample(range(300), 200):
            (root / f"sub/{name}").write_bytes(random.randbytes(random.choice((0, 10, 5000))))
        (root / "large").write_bytes(random.randbytes(3 * PART))
        with closing(host.snapshot()) as snapshot:
            began = time.monotonic()
            errand = host.start(snapshot)
            timer = threading.Timer(random.uniform(0.0, whole), kill)
            if number:
                timer.start()
            while line := host.line(errand):
                answer_it(errand, snapshot, line)
            if number:
                timer.join()
            else:
                whole = time.monotonic() - began
        copy = Path(host.copy()["directory"])
        left = without_own(copy)
        assert left.pop("mine", None) == ((b"notes", False) if fixed else None)
        assert left == tree_of(root)
        assert not [path for path in copy.parent.glob("**/*") if path.suffix in (".part", ".new")]
    assert len(killed) > 10
