"""Files of commits: what a reader takes for whole, which versions stand, and which version a round restores."""

import fcntl
import mmap
import os
import random
import shutil
import time
import uuid
from pathlib import Path

import pytest

from hvlaunch.agent import commits, scratch
from hvlaunch.agent.commits import CHUNK, PAGE, KeptCommit, NoRoom

pytestmark = pytest.mark.no_cover
LENGTH = 2 * CHUNK + 777


@pytest.fixture
def folder():
    path = commits.make_directory(f"/tmp/hvlaunch-{uuid.uuid4().hex}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def content_of(round_number: int, step: int, length: int = LENGTH) -> bytes:
    return random.Random(round_number << 32 | step).randbytes(length)


def write(folder, step, *, name="default.0", round_number=0, size=1, length=LENGTH, keep=(), is_sealed=True):
    """KeptCommit content that follows from its version, or leave it as a worker that was killed before the header."""
    commit = KeptCommit(name, round_number, step, size, 0, length)
    descriptor = commits.begin(folder, commit, keep)
    path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
    os.pwrite(descriptor, content_of(round_number, step, length), PAGE)
    if is_sealed:
        commits.seal(descriptor, commit)
    commits.release(descriptor)
    return path


def restored(folder, name="default.0"):
    """Return the newest version whose checksums fit, and its content, as a worker finds it."""
    for commit in commits.held(folder):
        if commit.name == name:
            with commits.shared_lock(commit) as descriptor:
                if commits.is_whole(descriptor, commit):
                    return commit.version, os.pread(descriptor, commit.length, PAGE)
    return None


def steps(folder, name="default.0"):
    return [commit.step for commit in commits.held(folder) if commit.name == name]


def test_newest_versions_stand_and_a_half_written_one_does_not_count(folder):
    for step in range(1, 8):
        write(folder, step)
    assert steps(folder) == [7, 6, 5]
    write(folder, 8, is_sealed=False)
    assert steps(folder) == [7, 6]
    assert restored(folder) == ((0, 7), content_of(0, 7))


def test_state_of_all_ranks_has_two_files(folder):
    for step in range(1, 5):
        write(folder, step, size=0)
    write(folder, 5, size=0, is_sealed=False)
    assert steps(folder) == [4]


def test_pinned_version_stands_while_newer_ones_come(folder):
    for step in range(1, 9):
        write(folder, step, keep=[(0, 2)] if step > 2 else ())
    assert steps(folder) == [8, 7, 2]


def test_later_round_counts_for_more_than_a_later_step(folder):
    write(folder, 9)
    write(folder, 5, round_number=1)
    write(folder, 6, round_number=1, is_sealed=False)
    assert restored(folder) == ((1, 5), content_of(1, 5))


def test_smaller_and_larger_values_share_the_files(folder):
    for step, length in enumerate((100, LENGTH, 0, 5, 3 * LENGTH), 1):
        write(folder, step, length=length)
        assert restored(folder) == ((0, step), content_of(0, step, length))


def test_writer_passes_a_file_that_is_being_read(folder):
    for step in (1, 2, 3):
        write(folder, step)
    with commits.shared_lock(commits.held(folder)[-1]) as descriptor:
        write(folder, 4)
        assert os.pread(descriptor, LENGTH, PAGE) == content_of(0, 1)
    assert steps(folder) == [4, 3, 1]


def test_no_corruption_restores_wrong_content(folder):
    """A thousand corruptions of the newest commit and of the one before: a reader gets a true version or nothing."""
    chance = random.Random(7)
    originals = {}
    for step in (1, 2, 3):
        path = write(folder, step, length=3 * 1024 + 5)
        originals[path] = Path(path).read_bytes()
    true = {(0, step): content_of(0, step, 3 * 1024 + 5) for step in (1, 2, 3)}
    newest = list(originals)[-1]
    fallbacks = 0
    for number in range(1000):
        for path, original in originals.items():
            Path(path).write_bytes(original)
        data = bytearray(originals[newest])
        kind = number % 5
        if kind == 0:  # bits
            for _ in range(chance.randint(1, 4)):
                data[
                    chance.choice((chance.randrange(PAGE + len(data) % PAGE), chance.randrange(len(data))))
                ] ^= 1 << chance.randrange(8)
        elif kind == 1:  # a part that never came
            del data[chance.randrange(len(data)) :]
        elif kind == 2:  # a part of another version
            other = originals[chance.choice(list(originals)[:-1])]
            begin = chance.randrange(len(data))
            end = chance.randint(begin + 1, len(data))
            data[begin:end] = other[begin:end]
        elif kind == 3:  # a part that was not written
            begin = chance.randrange(len(data))
            data[begin : begin + chance.randint(1, 2000)] = bytes(chance.randint(1, 2000))
        else:  # two files change places, or one comes from another state
            first, last = next(iter(originals)), newest
            Path(first).replace(f"{folder}/x")
            Path(last).replace(first)
            Path(f"{folder}/x").replace(last if chance.random() < 0.5 else f"{folder}/default.1.0")
            data = bytearray()
        if data:
            Path(newest).write_bytes(data)
        result = restored(folder)
        assert result is not None
        assert result[1] == true[result[0]], (number, kind)
        fallbacks += result[0] != (0, 3)
        assert restored(folder, "default.1") is None
    assert fallbacks > 500, "the corruptions did not reach the newest commit"


def test_header_torn_at_each_byte_does_not_count(folder):
    path = write(folder, 1, length=64)
    with Path(path).open("r+b") as file:
        new = file.read(PAGE)
        length = len(new.rstrip(b"\0"))
        for end in range(length):
            file.seek(0)
            file.write(new[:end] + bytes(PAGE - end))
            file.flush()
            # The last bytes of the digest may be zeros themselves.
            assert new[end:length].strip(b"\0") == b"" or commits.held(folder) == []


def test_copy_with_other_checksums_than_its_origin_is_refused(folder):
    write(folder, 1)
    commit = commits.held(folder)[0]
    with commits.shared_lock(commit) as descriptor:
        table = commits.table_of(descriptor, commit)
    target = commits.begin(folder, commit._replace(name="default.1"))
    os.pwrite(target, content_of(0, 1)[:-1] + b"\0", PAGE)
    with pytest.raises(ValueError, match="checksums"):
        commits.seal(target, commit._replace(name="default.1"), table)
    commits.release(target)
    assert steps(folder, "default.1") == []


def test_too_little_memory_is_named_before_anything_is_written(folder, monkeypatch):
    write(folder, 1, length=100)
    monkeypatch.setattr(commits, "available", lambda: 1_000_000_000)
    with pytest.raises(NoRoom, match=r"commits need 1\.5 GB more, and half of 1\.0 GB free memory is less"):
        write(folder, 2, length=500_000_000)
    assert steps(folder) == [1]


def test_directory_goes_with_the_jobs_private_directory(tmp_path):
    private = tmp_path / f"hvlaunch-{uuid.uuid4().hex}"
    private.mkdir()
    kept = Path(commits.make_directory(str(private)))
    assert kept.stat().st_mode & 0o777 == 0o700
    write(str(kept), 1)
    scratch.remove(str(private))
    assert not kept.exists()


def test_only_leftovers_of_killed_agents_are_removed(tmp_path):
    old = time.time() - 2 * 86400
    paths = {}
    for state in ("dead", "alive", "gone"):
        private = tmp_path / f"hvlaunch-{uuid.uuid4().hex}"
        private.mkdir()
        paths[state] = Path(commits.make_directory(str(private)))
        os.utime(private, None if state == "alive" else (old, old))
        os.utime(paths[state], (old, old))
        if state == "gone":
            private.rmdir()
    new = commits.make_directory(str(tmp_path / f"hvlaunch-{uuid.uuid4().hex}"))
    assert {state: path.exists() for state, path in paths.items()} == {
        "dead": False,
        "alive": True,
        "gone": False,
    }
    for path in (new, paths["alive"]):
        shutil.rmtree(path)


def test_lock_ends_with_its_release_while_a_mapping_lives(folder):
    path = write(folder, 1)
    with commits.shared_lock(commits.held(folder)[0]) as descriptor:
        mapped = mmap.mmap(descriptor, PAGE)
    with Path(path).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mapped.close()


def held_by(**hosts):
    """Return commits by host, from lists of (rank, round, step)."""
    return {
        host: [KeptCommit(f"default.{rank}", number, step, 2, 0, 1) for rank, number, step in items]
        for host, items in hosts.items()
    }


def test_chosen_version_is_the_newest_that_every_rank_can_have():
    both = ["default.0", "default.1"]
    commits_here = held_by(a=[(0, 0, 5), (0, 0, 4)], b=[(1, 0, 4), (1, 0, 3), (0, 0, 4)])
    choice = commits.choose(commits_here, both, 2)
    assert choice is not None
    version, places = choice
    assert version == (0, 4)
    assert {name: sorted(hosts) for name, hosts in places.items()} == {
        "default.0": ["a", "b"],
        "default.1": ["b"],
    }
    # The same step of two rounds is not one version.
    assert commits.choose(held_by(a=[(0, 0, 5)], b=[(1, 1, 5)]), both, 2) is None
    # Parts of two ranks are no state of three.
    assert commits.choose(commits_here, both, 3) is None
    assert commits.choose(commits_here, [*both, "default.2"], 2) is None


def test_buddies_are_in_other_racks_in_pairs_and_evenly_loaded():
    racks = {f"h{number}": f"r{number % 2}" for number in range(8)}
    result = commits.buddies(racks, 1)
    assert all(racks[buddy] != racks[host] for host, (buddy,) in result.items())
    assert all(result[buddy] == [host] for host, (buddy,) in result.items())
    without = commits.buddies(dict.fromkeys(racks, ""), 1)
    assert all(without[buddy] == [host] for host, (buddy,) in without.items())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_buddies_stay_when_hosts_come_and_go(count):
    chance = random.Random(count)
    for _ in range(200):
        racks = {f"h{number}": chance.choice(["", "r1", "r2"]) for number in range(chance.randint(1, 9))}
        before = commits.buddies(racks, count)
        lost = chance.choice(list(racks))
        after = {host: rack for host, rack in racks.items() if host != lost} | {"new": "r2"}
        result = commits.buddies(after, count, before)
        for host, chosen in result.items():
            assert host not in chosen
            assert len(set(chosen)) == len(chosen) == min(count, len(after) - 1)
            assert set(before.get(host, ())) - {lost} <= set(chosen)
        most = max(sum(host in chosen for chosen in before.values()) for host in racks)
        assert most <= 2 * count, "copies gather on one host"


def test_no_buddy_without_another_host():
    assert commits.buddies({"a": ""}, 1) == {"a": []}
    assert commits.buddies({}, 1) == {}
