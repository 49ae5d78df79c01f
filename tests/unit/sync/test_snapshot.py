"""Snapshots of a working tree: whole, consistent, quick when nothing changed, and fixed once they are taken."""

import json
import os
import threading
import time
import zlib
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvlaunch.agent.errands.sync.content import PART
from hvlaunch.errors import BadUsage
from hvlaunch.sync import snapshot as module
from hvlaunch.sync.snapshot import TreeSnapshot, load_snapshot, take_snapshot

GB = 1 << 30


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "project"
    path.mkdir()
    return path


@pytest.fixture
def cache(tmp_path):
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


def content(snapshot: TreeSnapshot) -> dict[str, object]:
    """What the snapshot has of each path."""
    number = {part: index for index, part in enumerate(snapshot.numbered)}
    result: dict[str, object] = {}
    for kind, path, *more in json.loads(zlib.decompress(snapshot.manifest)):
        if kind == "f":
            is_executable, size, parts = more
            data = b"".join(snapshot.read(number[part]) for part in parts)
            assert (len(data), [sha256(data[at : at + PART]).hexdigest() for at in range(0, size, PART)]) == (
                size,
                parts,
            )
            result[path] = (data, bool(is_executable))
        else:
            result[path] = more[0] if kind == "l" else None
    return result


def taken(root: Path, cache: Path) -> tuple[str, dict[str, object]]:
    with closing(take_snapshot(str(root), cache, GB)) as snapshot:
        return snapshot.hash, content(snapshot)


def test_a_snapshot_has_all_there_is(root, cache):
    large = os.urandom(2 * PART + 5)
    (root / "sub").mkdir()
    (root / "sub/large").write_bytes(large)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "empty").touch()
    (root / "link").symlink_to("sub/large")
    (root / "absolute").symlink_to(root / "run.sh")
    tree_hash, tree = taken(root, cache)
    assert tree == {
        "sub": None,
        "sub/large": (large, False),
        "run.sh": (b"#!/bin/sh\n", True),
        "empty": (b"", False),
        "link": "sub/large",
        "absolute": "run.sh",
    }
    assert taken(root, cache) == (tree_hash, tree)


def test_equal_trees_have_equal_hashes_and_each_change_another(root, cache):
    (root / "a").write_text("1")
    hashes = [taken(root, cache)[0]]
    for change in (
        lambda: (root / "a").write_text("2"),
        lambda: (root / "a").chmod(0o755),
        lambda: (root / "a").rename(root / "b"),
        (root / "d").mkdir,
        lambda: (root / "l").symlink_to("b"),
        (root / "b").unlink,
    ):
        change()
        hashes.append(taken(root, cache)[0])
    assert len(set(hashes)) == len(hashes)
    (root / "l").unlink()
    (root / "d").rmdir()
    (root / "a").write_text("1")
    assert taken(root, cache)[0] == hashes[0]


def test_only_what_changed_is_read_again(root, cache, monkeypatch):
    for name in "abc":
        (root / name).write_text(name)
    taken(root, cache)
    read: list[str] = []
    own_read = module._Reader._read

    def note(self, path, *more):
        read.append(path)
        return own_read(self, path, *more)

    monkeypatch.setattr(module._Reader, "_read", note)
    taken(root, cache)
    assert read == []
    (root / "b").write_text("other")
    assert taken(root, cache)[1]["b"] == (b"other", False)
    assert read == ["b"]


def test_a_change_with_the_same_size_and_time_is_seen(root, cache):
    (root / "a").write_text("old")
    os.utime(root / "a", (1000, 1000))
    taken(root, cache)
    (root / "a").write_text("new")
    os.utime(root / "a", (1000, 1000))
    assert taken(root, cache)[1]["a"] == (b"new", False)


def test_a_snapshot_stays_when_the_tree_and_its_cache_go(root, cache):
    (root / "a").write_text("first")
    with closing(take_snapshot(str(root), cache, GB)) as snapshot:
        (root / "a").write_text("second")
        with closing(take_snapshot(str(root), cache, GB)) as later:
            for path in cache.rglob("*.pack"):
                path.unlink()
            assert content(snapshot)["a"] == (b"first", False)
            assert content(later)["a"] == (b"second", False)


def test_a_successor_finds_it_in_the_jobs_directory(root, cache, tmp_path):
    (root / "a").write_text("first")
    job = tmp_path / "job"
    job.mkdir()
    with closing(take_snapshot(str(root), cache, GB)) as snapshot:
        snapshot.save(job)
        expected = snapshot.hash, snapshot.name, content(snapshot)
    for path in cache.rglob("*.pack"):
        path.unlink()
    (root / "a").unlink()
    with closing(load_snapshot(str(root), job)) as loaded:
        assert (loaded.hash, loaded.name, content(loaded)) == expected
    (job / "snapshot.json").write_text("{}")
    with pytest.raises(BadUsage, match=r"the job's copy of .* is gone"):
        load_snapshot(str(root), job)


def test_packs_with_old_content_go(root, cache, monkeypatch):
    monkeypatch.setattr(module, "_SPARE", 1000)
    for number in range(20):
        (root / "a").write_bytes(bytes([number]) * 500)
        assert taken(root, cache)[1]["a"] == (bytes([number]) * 500, False)
    assert sum(path.stat().st_size for path in cache.rglob("*.pack")) <= 2 * 500 + 1000 + 500


def test_without_a_change_the_index_is_not_read(root, cache, monkeypatch):
    (root / "sub").mkdir()
    (root / "sub/a").write_text("1")
    before = taken(root, cache)
    monkeypatch.setattr(module._Reader, "_read_until_quiet", lambda *_: pytest.fail("it looks for changes"))
    assert taken(root, cache) == before


@pytest.mark.parametrize("lost", ["directories.json", "statuses", "manifest", "index.json"])
def test_a_damaged_file_of_the_cache_is_made_anew(root, cache, lost):
    (root / "a").write_text("1")
    before = taken(root, cache)
    (file,) = cache.rglob(lost)
    whole = file.read_bytes()
    for damage in (b"", b"{}", b"[]", b"\xff", whole[:-9]):
        file.write_bytes(damage)
        assert taken(root, cache) == before
        assert file.stat().st_size == len(whole)


def test_a_broken_off_change_of_the_cache_is_repaired(root, cache, monkeypatch):
    (root / "a").write_text("1")
    taken(root, cache)
    (root / "a").write_text("2")
    own_write = module._Reader._write
    for left in ("manifest", "index.json", "statuses", "directories.json"):

        def write(self, name, data, left=left):
            if name == left:
                raise KeyboardInterrupt
            own_write(self, name, data)

        monkeypatch.setattr(module._Reader, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            taken(root, cache)
    monkeypatch.setattr(module._Reader, "_write", own_write)
    assert taken(root, cache)[1] == {"a": (b"2", False)}
    assert taken(root, cache)[1] == {"a": (b"2", False)}


def test_the_content_of_a_tree_is_removed_after_a_month_without_use(root, cache, tmp_path):
    (root / "a").write_text("1")
    taken(root, cache)
    (folder,) = cache.iterdir()
    os.utime(folder / "lock", (0, 0))
    other = tmp_path / "other"
    other.mkdir()
    taken(other, cache)
    assert not folder.exists()


def test_a_tree_is_copied_again_after_a_month(root, cache):
    (root / "a").write_text("1")
    before = taken(root, cache)
    (folder,) = cache.iterdir()
    os.utime(folder / "lock", (0, 0))
    assert taken(root, cache) == before


def test_the_oldest_content_goes_if_trees_have_too_much(root, cache, tmp_path, monkeypatch):
    """But not that of a tree that was used a moment ago; and a running job keeps what it has open."""
    monkeypatch.setattr(module, "_MOST", 500)
    trees = [tmp_path / f"tree{number}" for number in range(4)]
    folders = []
    jobs = []
    for age, tree in zip((300, 30, 200, 1), trees, strict=True):
        tree.mkdir()
        (tree / "a").write_bytes(os.urandom(1000))
        before = set(cache.iterdir())
        jobs.append(take_snapshot(str(tree), cache, GB))
        (folder,) = set(cache.iterdir()) - before
        folders.append(folder)
        used = time.time() - age
        for path in folders[-1:]:
            os.utime(path / "lock", (used, used))
    (root / "a").write_bytes(os.urandom(1000))
    taken(root, cache)
    assert [folder.exists() for folder in folders] == [False, True, False, True]
    for tree, job in zip(trees, jobs, strict=True):
        assert content(job)["a"] == ((tree / "a").read_bytes(), False)
        job.close()


def test_two_files_that_are_removed_together_are_in_no_snapshot_alone(root, cache, monkeypatch):
    """A program removes one file, a snapshot begins, and the program removes the other one within the tenth of a second."""
    for name in ("a", "z", "other"):
        (root / name).write_text(name)
    taken(root, cache)
    (root / "a").unlink()
    remover = threading.Timer(module._QUIET / 3, (root / "z").unlink)
    remover.start()
    tree = taken(root, cache)[1]
    remover.join()
    assert tree.keys() == {"other"}


def test_too_large_a_tree_is_an_error_that_names_the_largest_entries(root, cache):
    (root / "data").mkdir()
    for number in range(12):
        (root / f"file{number:02}").write_bytes(bytes(1000 * (number + 1)))
    (root / "data/x").write_bytes(bytes(50_000))
    with pytest.raises(
        BadUsage, match=r"has 128 kB, and --sync-limit is 60 kB; its largest entries: data/ 50 kB"
    ) as caught:
        take_snapshot(str(root), cache, 60_000)
    named = str(caught.value)
    assert "file11" in named
    assert "file03" in named
    assert "file02" not in named


def test_a_link_that_leads_out_of_the_tree_is_an_error(root, cache):
    (root / "sub").mkdir()
    for target in ("../outside", "/etc/passwd", "sub/../../x"):
        (root / "bad").unlink(missing_ok=True)
        (root / "bad").symlink_to(target)
        with pytest.raises(BadUsage, match="bad is a link that leads out of"):
            take_snapshot(str(root), cache, GB)


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_an_error_that_names_it(root, cache):
    (root / "secret").touch(mode=0)
    with pytest.raises(BadUsage, match="secret: permission denied"):
        take_snapshot(str(root), cache, GB)


def test_of_two_files_that_change_together_no_snapshot_has_one_alone(root, cache):
    """A program writes a number into two files, at once but for a moment, again and again."""
    (root / "a").write_text("0")
    (root / "z").write_text("0")
    for number in range(300):
        (root / f"m{number}").write_bytes(os.urandom(10_000))
    stopped = threading.Event()
    slow: set[object] = set()

    def write() -> None:
        number = 0
        while not stopped.wait(0.35):
            number += 1
            before = time.time()
            (root / "a").write_text(str(number))
            time.sleep(0.02)  # less than what counts as a moment
            (root / "z").write_text(str(number))
            if time.time() > before + module._QUIET / 2:  # the machine has too much to do
                slow.update([(b"", False), (str(number).encode(), False)])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        pairs = set()
        for _ in range(12):
            tree = taken(root, cache)[1]
            pairs.add((tree["a"], tree["z"]))
            (root / "m0").write_bytes(os.urandom(10))
    finally:
        stopped.set()
        writer.join()
    assert len(pairs) > 1, "the program has written meanwhile"
    # Only now is it certain which writes were slow.
    assert [pair for pair in pairs if pair[0] != pair[1] and pair[0] not in slow] == []


@pytest.mark.parametrize(("ahead", "waits"), [(0.05, True), (3600.0, False)])
def test_the_file_servers_clock_may_be_ahead_by_a_moment(root, cache, monkeypatch, ahead, waits):
    (root / "a").write_text("new")
    changed = (root / "a").stat().st_ctime
    pauses: list[float] = []
    # The module's alone: threads of other tests may be asleep.
    monkeypatch.setattr(f"{module.__name__}.time", SimpleNamespace(sleep=pauses.append, time_ns=time.time_ns))
    take_snapshot(str(root), cache, GB, lambda: changed - ahead).close()
    assert pauses == ([pytest.approx(module._QUIET + ahead, abs=1e-3)] if waits else [])


def test_a_tree_that_never_stands_still_is_an_error(root, cache, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    # On a busy machine the writer may stand still for longer than the tenth of a second that counts as quiet.
    monkeypatch.setattr(module, "_QUIET", 2.0)
    (root / "busy.txt").touch()
    stopped = threading.Event()

    def write() -> None:
        while not stopped.wait(0.02):
            (root / "busy.txt").write_text(str(time.time()))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(BadUsage, match=r"keeps changing, so no copy of it would be whole: busy\.txt"):
            take_snapshot(str(root), cache, GB)
    finally:
        stopped.set()
        writer.join()


def test_the_name_on_hosts_is_of_the_tree_and_harmless(root, cache, tmp_path):
    odd = tmp_path / "My Project; rm -rf ü"
    odd.mkdir()
    with closing(take_snapshot(str(odd), cache, GB)) as snapshot:
        assert snapshot.name.startswith("my-project-rm-rf-")
        assert set(snapshot.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
