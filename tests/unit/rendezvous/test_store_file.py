"""What a server keeps in its file, and what another makes of it, wherever the first one ended; its memory of requests that come twice."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvlaunch.rendezvous.serving import store_record
from hvlaunch.rendezvous.serving.http import Answer
from hvlaunch.rendezvous.serving.store_record import BadStoreFile, Once, StoreFile, StoreRecord
from hvlaunch.rendezvous.store import Store, StoreLimits

LIMITS = StoreLimits(deletions=3, deleted_names=20)
FRESH = 100  # the version of a store that is new; tests have no clock
NAMES = st.sampled_from(["a", "b", "é"])
VALUES = st.binary(max_size=12)
FORMAT = b"hvlaunch store 1\n"


class Rig(NamedTuple):
    """A server without a network."""

    store: Store
    once: Once
    keeping: StoreRecord
    said: list[str]

    def state(self) -> Any:
        """All that a client could ever see of it."""
        scopes = {scope for scope, _, _ in self.store.entries()} | {"a", "b", "é"}
        return (
            {scope: self.store.news(scope, 0) for scope in scopes},
            list(self.once),
            dict(self.keeping.notes),
            (self.store.keys, self.store.size, self.store.version, self.store.forgotten),
            {
                (scope, since): self.store.changes(scope, since=since)
                for scope in scopes
                for since in range(FRESH - 1, self.store.version + 2)
            },
        )


def rig(file: StoreFile | None) -> Rig:
    store, once = Store(LIMITS, version=FRESH), Once(size=3)
    said: list[str] = []
    keeping = StoreRecord(file, store, once, said.append, lambda: pytest.fail("a fault"))
    keeping.begin()
    return Rig(store, once, keeping, said)


def reopened(path: Path) -> Rig:
    return rig(StoreFile.open(path))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@contextmanager
def written(path: Path, **options: Any) -> Iterator[Rig]:
    """A rig with a file, which is closed at the end."""
    one = rig(StoreFile.create(path, **options))
    yield one
    one.keeping.close()


STEPS = st.one_of(
    st.tuples(st.just("put"), NAMES, NAMES, VALUES),
    st.tuples(st.just("append"), NAMES, NAMES, VALUES),
    st.tuples(st.just("delete"), NAMES, NAMES),
    st.tuples(st.just("delete scope"), NAMES),
    st.tuples(st.just("once"), NAMES, st.sampled_from([b"x", b"y", b"z", b"0", b"1"])),
    st.tuples(st.just("note"), NAMES, VALUES),
    st.just(("flush",)),
    st.just(("rewrite",)),
)


def take(one: Rig, step: Any) -> None:
    match step:
        case "put", scope, key, value:
            one.store.put(scope, key, value)
        case "append", scope, key, value:
            one.store.append(scope, key, value)
        case "delete", scope, key:
            one.store.delete(scope, key)
        case "delete scope", scope:
            one.store.delete_scope(scope)
        case "once", key, identity:
            one.once(identity, lambda: Answer(200, b"%d" % one.store.put("a", key, b"")), Answer)
        case "note", name, value:
            one.keeping.note(name, value)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=40), data=st.data())
def test_a_file_cut_at_any_byte_has_the_complete_records(steps, data):
    with TemporaryDirectory() as directory:
        path = Path(directory, "store")
        with written(path) as one:
            states: dict[int, Any] = {}
            for number, step in enumerate([("flush",), *steps, ("flush",)]):
                take(one, step)
                if step == ("rewrite",):
                    states = {}
                    one.keeping._rewrite_at = 0
                    one.keeping.note("rewritten", b"%d" % number)
                if step[0] in ("flush", "rewrite"):
                    one.keeping.flush()
                    states[path.stat().st_size] = one.state()
        cut = data.draw(st.integers(min(states), path.stat().st_size), label="cut")
        with path.open("r+b") as file:
            file.truncate(cut)
        again = reopened(path)
        assert again.state() == states[max(size for size in states if size <= cut)]
        before = again.store.version
        assert again.store.put("a", "later", b"") > before
        again.keeping.close()
        assert reopened(path).state() == again.state()


@pytest.fixture
def three(path):
    """A file of three blocks behind the first: its bytes, and the states after each."""
    with written(path) as one:
        one.keeping.flush()
        states = [one.state()]
        for number in range(3):
            one.store.put("a", "k", b"%d" % number)
            one.keeping.flush()
            states.append(one.state())
    return path.read_bytes(), states


def test_any_wrong_byte_is_noticed(three, path):
    content, states = three
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        path.chmod(0o600)
        try:
            state = reopened(path).state()
        except BadStoreFile as error:
            assert str(path) in str(error)
        else:
            assert state == states[2]  # the last block counts as one whose writer was killed
            assert at > content.index(b"ak1")


def test_zeros_behind_the_last_record_are_ignored(three, path):
    content, states = three
    path.write_bytes(content + bytes(5000))
    assert reopened(path).state() == states[3]


def test_missing_doubled_and_swapped_records_are_noticed(three, path):
    content, _ = three
    ends = [at for at in range(len(FORMAT), len(content) + 1) if whole(content[:at], path)]
    assert len(ends) == 5
    first, second = content[ends[1] : ends[2]], content[ends[2] : ends[3]]
    for wrong in (
        content[: ends[1]] + content[ends[2] :],
        content[: ends[2]] + first + content[ends[2] :],
        content[: ends[1]] + second + first + content[ends[3] :],
    ):
        path.write_bytes(wrong)
        with pytest.raises(BadStoreFile, match="this is damaged: a checksum is wrong"):
            reopened(path)


def whole(content: bytes, path: Path) -> bool:
    """Whether nothing is cut off when it is opened."""
    path.write_bytes(content)
    path.chmod(0o600)
    file = StoreFile.open(path)
    list(file.read())
    file.close()
    return path.stat().st_size == len(content)


@pytest.mark.parametrize(
    ("content", "mode", "cause"),
    [
        (b"", 0o600, "it was given up"),
        (b"hvlaunch store 2\n", 0o600, "this is no store file of this version of hvlaunch"),
        (b"SQLite format 3\0", 0o600, "this is no store file of this version of hvlaunch"),
        (FORMAT, 0o644, "it is not a file that only this user can read and change"),
        (None, 0, "no such file or directory"),
    ],
)
def test_another_file_is_refused_with_a_reason(path, content, mode, cause):
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(BadStoreFile, match=cause) as caught:
        StoreFile.open(path)
    assert caught.value.path == path


def test_a_link_is_not_followed(path, tmp_path):
    with written(tmp_path / "other"):
        pass
    path.symlink_to("other")
    with pytest.raises(BadStoreFile):
        StoreFile.open(path)
    with pytest.raises(FileExistsError):
        StoreFile.create(path)


def test_the_file_is_private_even_after_a_rewrite(path):
    old = os.umask(0)
    try:
        with written(path) as one:
            modes = [stat.S_IMODE(path.stat().st_mode)]
            one.keeping._rewrite_at = 0
            one.store.put("a", "k", b"secret")
            one.keeping.flush()
            modes.append(stat.S_IMODE(path.stat().st_mode))
    finally:
        os.umask(old)
    assert modes == [0o600, 0o600]
    assert list(path.parent.iterdir()) == [path]


def test_an_appended_value_is_written_in_parts(path):
    with written(path) as one:
        for _ in range(200):
            one.store.append("a", "k", b"x" * 1000)
        one.keeping.flush()
        assert path.stat().st_size < 300_000
        version = one.store.version
    again = reopened(path)
    assert again.store.read("a", "k") == (b"x" * 200_000, version)
    assert again.store.size == one.store.size


def test_the_file_stays_small_after_many_changes(path, monkeypatch):
    monkeypatch.setattr(store_record, "_SLACK", 10_000)
    with written(path) as one:
        one.store.put("a", "stays", b"s")
        for number in range(2000):
            one.store.put("a", str(number % 7), b"x" * 100)
            one.keeping.flush()
            assert path.stat().st_size < 20_000
        state = one.state()
    assert reopened(path).state() == state


def test_watchers_get_all_keys_after_a_reboot(path, monkeypatch):
    with written(path) as one:
        one.store.put("a", "k", b"v")
        since = one.store.version
        one.store.delete("a", "k")
        one.store.put("a", "j", b"w")
    changes = reopened(path).store.changes("a", since=since)
    assert changes is not None
    assert (dict(changes.values), changes.complete) == ({"k": None, "j": b"w"}, False)
    monkeypatch.setattr(store_record, "_boot", lambda: b"another")
    changes = reopened(path).store.changes("a", since=since)
    assert changes is not None
    assert (dict(changes.values), changes.complete) == ({"j": b"w"}, True)


# When nothing can be kept any more


def given_up(one: Rig, path: Path, cause: str, told: str | None = None) -> None:
    """`told`: what there was room to say of it in the file. The job goes on, its user is told once, and nobody takes the job over with less than it had."""
    one.store.put("a", "later", b"v")
    one.keeping.flush()
    assert not one.keeping.is_kept
    assert not one.keeping.is_behind
    assert one.store.get("a", "later") == b"v"
    assert one.said == [
        f"warning: the rendezvous store is no longer kept on disk ({cause}): no other driver can take this job over"
    ]
    with pytest.raises(BadStoreFile, match="it was given up" + (f": {cause}" if told is None else told)):
        StoreFile.open(path)


def test_more_values_than_the_limit_are_not_kept(path):
    with written(path, limit=3 << 20) as one:
        one.store.put("a", "k", b"x" * (3 << 20) + b"y")
        one.keeping.flush()
        given_up(one, path, "there are more than 3 MiB of values")


def test_a_full_disk_is_reported_once(path, monkeypatch):
    with written(path) as one:
        one.keeping.flush()
        write, room = os.pwrite, [100]

        def full(descriptor: int, data: Any, offset: int) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            size = write(descriptor, bytes(data[: room[0]]), offset)
            room[0] -= size
            return size

        monkeypatch.setattr(os, "pwrite", full)
        waited = []
        one.store.put("a", "k", b"x" * 200)
        one.keeping.then(lambda: waited.append(1))
        one.keeping.flush()
        assert waited == [1]
        monkeypatch.undo()
        given_up(one, path, "no space left on device", told="")


def test_a_read_only_disk_is_reported_once(path, monkeypatch):
    with written(path) as one:
        one.keeping.flush()
        monkeypatch.setattr(os, "pwrite", read_only)
        one.store.put("a", "k", b"")
        one.keeping.flush()
        assert (one.keeping.is_kept, len(one.said)) == (False, 1)
        assert "read-only file system" in one.said[0]
        one.store.put("a", "k", b"again")
        one.keeping.flush()
        assert len(one.said) == 1


SMALL_DISK = """
import resource, sys
from pathlib import Path
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.store_record import StoreFile

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with RendezvousServer("t0ken", file=StoreFile.create(Path(sys.argv[1])), say=print) as server:
    for number in range(20):
        server.put("s", str(number), b"x" * 9_999)
    print(len(server.keys("s")), server.is_kept)
"""


def test_the_server_continues_after_a_partial_write(path):
    argv = [sys.executable, "-c", SMALL_DISK, path]
    said, found = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert "is no longer kept on disk (file too large)" in said
    assert found == "20 False"
    with pytest.raises(BadStoreFile, match="it was given up: file too large"):
        StoreFile.open(path)


def read_only(_descriptor: int, _data: Any, _offset: int) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


def test_only_the_newest_are_remembered():
    once = Once(size=2)
    for identity in (b"a", b"b", b"c"):
        once(identity, lambda: Answer(200), Answer)
    assert once(b"c", pytest.fail, Answer) == Answer(200)
    assert once(b"b", pytest.fail, Answer) == Answer(200)
    assert once(b"a", lambda: Answer(404), Answer) == Answer(404)


def test_without_an_identity_it_is_done_each_time():
    once = Once()
    answers = iter([Answer(200), Answer(404)])
    assert [once(None, lambda: next(answers), Answer) for _ in range(2)] == [Answer(200), Answer(404)]


def test_failures_are_not_remembered():
    once = Once()
    assert once(b"a", lambda: Answer(412), Answer) == Answer(412)
    assert once(b"a", lambda: Answer(200), Answer) == Answer(200)
