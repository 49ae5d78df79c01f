"""Files of commits: what a reader takes for whole, which versions stand, and which version a round restores."""

import fcntl
import mmap
import os
import random
import shutil
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvlaunch.agent import commits, scratch
from hvlaunch.agent.commits import CHUNK, PAGE, KeptCommit, NoRoom
from hvlaunch.agent.proc import Room, commit_room

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
    descriptor = commits.begin(folder, commit, lambda: (keep, False))
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


def test_file_with_all_pages_is_written_without_a_look_at_each(folder, monkeypatch):
    for step in (1, 2, 3):
        write(folder, step)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the file has its memory"))
    write(folder, 4)
    assert restored(folder) == ((0, 4), content_of(0, 4))


def test_file_with_holes_gets_its_memory(folder):
    """As left by a worker that was killed while it prepared the file."""
    commit = KeptCommit("default.0", 0, 1, 1, 0, LENGTH)
    descriptor = commits.prepare(folder, commit)
    assert descriptor is not None
    size = commits.size_of_file(LENGTH)
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, CHUNK)
    commits.release(descriptor)
    path = Path(write(folder, 1))
    assert path.name == "default.0.0"
    assert path.stat().st_blocks * 512 >= size
    assert restored(folder) == ((0, 1), content_of(0, 1))


def test_only_files_that_are_missing_are_prepared(folder):
    commit = KeptCommit("default.0", 0, 1, 1, 0, LENGTH)
    for count in range(5):
        descriptor = commits.prepare(folder, commit, is_saved=True)
        assert (descriptor is None) == (count == 4)
        if descriptor is not None:
            commits.release(descriptor)
    assert steps(folder) == []


def test_too_little_memory_is_named_before_anything_is_written(folder, monkeypatch):
    write(folder, 1, length=100)
    monkeypatch.setattr(commits, "commit_room", lambda: Room(500_000_000, "/dev/shm", "a larger one"))
    words = r"they need 1\.5 GB more, and half of the 1\.0 GB free in /dev/shm is less; try: a larger one"
    with pytest.raises(NoRoom, match=words):
        write(folder, 2, length=500_000_000)
    assert steps(folder) == [1]


def test_all_ranks_of_a_host_must_have_room_before_the_first_writes(folder, monkeypatch):
    commit = KeptCommit("default.0", 0, 1, 4, 0, 500_000)
    # A shared state of another name leaves its own files out of the sum, and so does a file of no commit.
    write(folder, 1, name="default.shared", size=0, length=3_000_000)
    (Path(folder) / "pins").write_text("0\n")
    monkeypatch.setattr(commits, "commit_room", lambda: Room(5_000_000, "/dev/shm", "a larger one"))
    with pytest.raises(NoRoom, match=r"those of 4 workers need 6\.0 MB more"):
        commits.begin(folder, commit, states=4)
    assert not (Path(folder) / "default.0.0").exists()
    # Memory that the ranks have already is no more to be found.
    for rank in range(3):
        write(folder, 1, name=f"default.{rank}", length=500_000)
    commits.release(commits.begin(folder, commit._replace(name="default.3"), states=4))
    # A state with all of its files goes on, however little is free.
    for step in (2, 3):
        write(folder, step, length=500_000)
    monkeypatch.setattr(commits, "commit_room", lambda: Room(0, "/dev/shm", "a larger one"))
    commits.release(commits.begin(folder, commit._replace(step=4), states=4))


@pytest.mark.parametrize(
    ("shm", "memory", "limit", "room"),
    [
        (64 << 20, 8 << 30, None, (64 << 20, "/dev/shm")),
        (16 << 30, 8 << 30, None, (8 << 30, "the host's memory")),
        (16 << 30, 8 << 30, 1 << 30, (1 << 30, "the memory of the job's cgroup")),
        (16 << 30, None, None, (16 << 30, "/dev/shm")),
    ],
)
def test_room_is_half_of_the_scarcest_place(tmp_path, monkeypatch, shm, memory, limit, room):
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=shm >> 12, f_frsize=4096))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    if memory is not None:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {memory >> 10} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(limit or "max"))
    found = commit_room(str(tmp_path))
    assert (2 * found.size, found.place) == room


def test_little_room_is_a_warning_with_the_next_step(monkeypatch):
    monkeypatch.setattr(commits, "commit_room", lambda: Room(32 << 20, "/dev/shm", "a larger one"))
    assert commits.little_room(2) == (
        "commits have room for 33.6 MB, half of what is free in /dev/shm: hardly enough for 2 workers; try: a larger one"
    )
    monkeypatch.setattr(commits, "commit_room", lambda: Room(128 << 20, "/dev/shm", "a larger one"))
    assert commits.little_room(2) is None


def test_each_topic_has_one_message_for_a_host(folder):
    assert [commits.is_first_to_say(folder, topic) for topic in ("a", "b", "a", "b")] == [
        True,
        True,
        False,
        False,
    ]
    assert commits.is_first_to_say("/nowhere", "a")


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
        mapped = mmap.mmap(descriptor, PAGE, access=mmap.ACCESS_READ)
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


def test_buddies_are_pairs_with_equal_loads():
    result = commits.buddies([f"h{number}" for number in range(8)], 1)
    assert all(result[buddy] == [host] for host, (buddy,) in result.items())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_buddies_stay_when_hosts_come_and_go(count):
    chance = random.Random(count)
    for _ in range(200):
        hosts = [f"h{number}" for number in range(chance.randint(1, 9))]
        before = commits.buddies(hosts, count)
        lost = chance.choice(hosts)
        after = [host for host in hosts if host != lost] + ["new"]
        result = commits.buddies(after, count, before)
        for host, chosen in result.items():
            assert host not in chosen
            assert len(set(chosen)) == len(chosen) == min(count, len(after) - 1)
            assert set(before.get(host, ())) - {lost} <= set(chosen)
        for kept in (before, result):
            loads = [sum(host in chosen for chosen in kept.values()) for host in kept]
            assert max(loads) <= count + 1, "copies gather on one host"


def test_lone_host_has_no_buddy():
    assert commits.buddies(["a"], 1) == {"a": []}
    assert commits.buddies([], 1) == {}


def test_missing_copies_are_of_the_newest_complete_version():
    own = held_by(a=[(0, 0, 5), (0, 0, 4)], b=[(1, 0, 4), (1, 0, 3)])
    keepers = {"a": ["b"], "b": ["a"]}
    targets, missing = commits.copies(own, {}, keepers)
    assert targets == [(0, 4)]
    assert {(host, source, commit.name, commit.step) for host, source, commit in missing} == {
        ("b", "a", "default.0", 4),
        ("a", "b", "default.1", 4),
    }
    copied = held_by(a=[(1, 0, 4)], b=[(0, 0, 4)])
    assert commits.copies(own, copied, keepers) == ([(0, 4)], [])
    # Ranks of a smaller, later round are the present ones.
    later = {"a": [KeptCommit("default.0", 1, 6, 1, 0, 1), *own["a"]], "b": own["b"]}
    targets, missing = commits.copies(later, copied, keepers)
    assert targets == [(1, 6)]
    assert [(host, commit.step) for host, _, commit in missing] == [("b", 6)]


def test_common_state_is_copied_from_a_lone_host_alone():
    commit = KeptCommit("default.shared", 0, 3, 0, 0, 1)
    keepers = {"a": ["b"], "b": ["a"]}
    assert commits.copies({"a": [commit]}, {}, keepers) == ([(0, 3)], [("b", "a", commit)])
    assert commits.copies({"a": [commit], "b": [commit]}, {}, keepers) == ([(0, 3)], [])


class Story:
    """A seeded history of ranks that save in step, of copies on other hosts, and of losses; by versions alone.

    The rules are the product's: the files that a writer may overwrite, the target of copies, buddies, and the choice of a version.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.hosts = [f"h{number}" for number in range(self.chance.randint(2, 6))]
        self.per_host = self.chance.randint(1, 2)
        self.size = len(self.hosts) * self.per_host
        self.files: dict[str, dict[str, dict[str, int]]] = {host: {} for host in self.hosts}
        """Whole steps by host, state and file; copies under `copies/STATE`."""
        self.pins: dict[str, tuple[list[int], bool]] = {host: ([], False) for host in self.hosts}
        self.saved = [0] * self.size
        self.open: dict[int, str] = {}
        """The file that each rank is writing."""
        self.safe: list[int] = []
        self.last_safe = 0

    def home(self, rank: int) -> str:
        return self.hosts[rank // self.per_host]

    def write(self, host: str, key: str) -> str | None:
        """Overwrite a file, and return it; None if the writer must wait."""
        whole = self.files[host].setdefault(key, {})
        pinned, is_held = self.pins[host]
        versions = {path: (0, step) for path, step in whole.items()}
        paths = ["0", "1", "2"]
        free = commits.free_files(versions, paths, [(0, step) for step in pinned], is_held=is_held)
        if not free:
            return None
        whole.pop(free[0], None)
        return free[0]

    def advance(self) -> None:
        """Let a rank seal its commit, or begin the next if the others have begun this one, as after a collective."""
        rank = self.chance.randrange(self.size)
        name = f"default.{rank}"
        if rank in self.open:
            self.files[self.home(rank)][name][self.open.pop(rank)] = self.saved[rank]
        elif self.saved[rank] == min(self.saved):
            file = self.write(self.home(rank), name)
            if file is not None:
                self.saved[rank] += 1
                self.open[rank] = file

    def listed(self, prefix: str, hosts: list[str]) -> dict[str, list[KeptCommit]]:
        return {
            host: [
                KeptCommit(key.removeprefix("copies/"), 0, step, self.size, 0, 1)
                for key, whole in self.files[host].items()
                if key.startswith("copies/") == bool(prefix)
                for step in whole.values()
            ]
            for host in hosts
        }

    def pin(self, versions: list[int], *, is_held: bool) -> None:
        for host in self.hosts:
            self.pins[host] = versions, is_held
            for _ in range(self.chance.randrange(8)):
                self.advance()

    def copy(self, stop: float) -> None:
        """Go through the driver's steps, with saves in between; break off with this probability."""
        keepers = commits.buddies(self.hosts, 1)
        self.pin(self.safe, is_held=True)
        targets, missing = commits.copies(
            self.listed("", self.hosts), self.listed("copies/", self.hosts), keepers
        )
        steps = [step for _, step in targets]
        self.pin([*self.safe, *steps], is_held=False)
        for host, source, commit in missing:
            if self.chance.random() < stop:
                return
            assert commit.step in self.files[source][commit.name].values(), "a pinned version was overwritten"
            file = self.write(host, f"copies/{commit.name}")
            assert file is not None
            for _ in range(self.chance.randrange(6)):
                self.advance()
            self.files[host][f"copies/{commit.name}"][file] = commit.step
        if targets:
            self.safe = steps
            self.last_safe = steps[0]
            self.pin(steps, is_held=False)

    def restored(self, hosts: list[str]) -> int:
        """Return the step that a new round on these hosts restores, 0 without one."""
        both = {host: self.listed("", [host])[host] + self.listed("copies/", [host])[host] for host in hosts}
        choice = commits.choose(both, [f"default.{rank}" for rank in range(self.size)], self.size)
        return 0 if choice is None else choice[0][1]


@pytest.mark.parametrize("seeds", [range(2000), pytest.param(range(20_000), marks=pytest.mark.long)])
def test_histories_of_stores_and_buddies_restore_what_is_safe(seeds):
    advanced = 0
    for seed in seeds:
        story = Story(seed)
        for _ in range(story.chance.randrange(60)):
            story.advance()
        for _ in range(story.chance.randrange(5)):
            story.copy(story.chance.choice((0.0, 0.0, 0.2)))
        # All workers die: only the saves that were in progress are lost.
        complete = min(story.saved) - 1
        pinned = {step for versions, _ in story.pins.values() for step in versions}
        everywhere = story.restored(story.hosts)
        assert everywhere >= (max(complete, 0) if not pinned else story.last_safe), seed
        # One host of each pair goes as well.
        keepers = commits.buddies(story.hosts, 1)
        gone = {host for host, (buddy,) in keepers.items() if keepers[buddy] == [host] and host < buddy}
        left = [host for host in story.hosts if host not in gone]
        assert story.restored(left) >= story.last_safe, seed
        advanced += story.last_safe > 1
    assert advanced > len(seeds) // 3, "copies do not follow the saves"
