"""A log has what was appended, whatever cuts it short, and refuses what no writer leaves."""

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.record import BadLog, Log, Mark, follow, pack_record, read_records, write_whole_at

MAGIC = b"test 1\n"
START = Mark(len(MAGIC))
BODIES = [b"one", b"two" * 50, b"\0" * 9, b"four"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    log = Log.create(path, MAGIC)
    for body in BODIES:
        log.append([body[:1], body[1:]])
    yield log
    log.close()


def bodies(content: bytes, start: Mark = START) -> list[bytes]:
    return [bytes(body) for body, _ in read_records(memoryview(content), start)]


def test_what_was_appended_is_read(log: Log, path: Path) -> None:
    content = path.read_bytes()
    assert bodies(content) == BODIES
    marks = [mark for _, mark in read_records(memoryview(content), START)]
    assert marks[-1] == log.end
    assert log.size == len(content)
    assert bodies(content, marks[1]) == BODIES[2:]


def test_cut_at_any_byte_it_has_the_whole_records_before(log: Log, path: Path) -> None:
    content = path.read_bytes()
    ends = [mark.size for _, mark in read_records(memoryview(content), START)]
    for size in range(len(MAGIC), len(content) + 1):
        count = sum(end <= size for end in ends)
        assert bodies(content[:size]) == BODIES[:count]
        # A loss of power can leave a file that is longer than what was written, by zeros.
        assert bodies(content[:size] + bytes(4096)) == BODIES[:count] if size in ends else True


def test_each_flipped_bit_is_noticed(log: Log, path: Path) -> None:
    content = path.read_bytes()
    last = [mark.size for _, mark in read_records(memoryview(content), START)][-2]
    for at in range(len(MAGIC), len(content)):
        flipped = content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
        try:
            assert bodies(flipped) == BODIES[:3]  # the last record counts as torn
            assert at >= last
        except BadLog as error:
            assert "checksum is wrong" in str(error) or "is no record" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.pop(1),
        lambda parts: parts.insert(1, parts[1]),
        lambda parts: parts.insert(1, parts.pop(2)),
    ],
)
def test_records_out_of_their_order_are_noticed(
    log: Log, path: Path, change: Callable[[list[bytes]], None]
) -> None:
    content = path.read_bytes()
    ends = [len(MAGIC), *(mark.size for _, mark in read_records(memoryview(content), START))]
    parts = [content[start:end] for start, end in itertools.pairwise(ends)]
    change(parts)
    with pytest.raises(BadLog, match="a checksum is wrong"):
        bodies(MAGIC + b"".join(parts))


def test_a_resumed_log_continues_behind_the_last_whole_record(log: Log, path: Path) -> None:
    path.write_bytes(path.read_bytes() + pack_record([b"torn"], log.end.check)[0][:-1])
    again = Log.resume(path, log.end)
    again.append([b"five"])
    assert bodies(path.read_bytes()) == [*BODIES, b"five"]


def test_only_its_user_can_read_it_and_an_old_file_stays(path: Path) -> None:
    before = os.umask(0)
    try:
        Log.create(path, MAGIC)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Log.create(path, MAGIC)


def test_records_behind_a_mark_are_replaced_at_once(log: Log, path: Path) -> None:
    marks = [mark for _, mark in read_records(memoryview(path.read_bytes()), START)]
    log.replace(marks[0], [[b"new"], [b"er"]])
    log.append([b"last"])
    assert bodies(path.read_bytes()) == [b"one", b"new", b"er", b"last"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    log.replace(START, [])
    assert path.read_bytes() == MAGIC


class Calls:
    """The system calls that write, in their order; the one with this number fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int = -1) -> None:
        self.names: list[str] = []
        for name in ("pwrite", "fdatasync", "fsync", "rename", "ftruncate"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name), failing))

    def _watched(self, name: str, call: Callable[..., Any], failing: int) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            if len(self.names) - 1 == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **options)

        return watched


def test_the_disk_has_a_synced_record_before_the_call_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    log = Log.create(path, MAGIC, is_synced=True)
    assert calls.names == ["pwrite", "fdatasync", "fsync"]
    calls.names.clear()
    log.append([b"one"])
    assert calls.names == ["pwrite", "fdatasync"]
    calls.names.clear()
    log.replace(START, [[b"a"], [b"b"]])
    # Content before the name, the name before anything that follows.
    assert calls.names == ["pwrite", "pwrite", "pwrite", "fdatasync", "rename", "fsync"]


@pytest.mark.parametrize("failing", range(5))
def test_a_replacement_that_fails_leaves_the_old_records(
    path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    log = Log.create(path, MAGIC, is_synced=True)
    log.append([b"old"])
    with monkeypatch.context() as patches:
        Calls(patches, failing)
        with pytest.raises(OSError, match="No space left"):
            log.replace(START, [[b"a"], [b"b"]])
    assert list(path.parent.iterdir()) == [path]
    log.append([b"more"])
    assert bodies(path.read_bytes()) == [b"old", b"more"]


def test_a_write_that_fails_in_the_middle_leaves_the_file_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.create(path, MAGIC)
    log.append([b"old"])
    real, room = os.pwrite, [20]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real(descriptor, bytes(data[: room[0]]), offset)
        room[0] -= size
        return size

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        log.append([b"x" * 100])
    assert path.stat().st_size == log.size
    room[0] = 1000
    log.append([b"new"])
    assert bodies(path.read_bytes()) == [b"old", b"new"]


def test_a_growing_file_is_followed(path: Path) -> None:
    data = b"".join(pack_record([body])[0] for body in (b"a", b"b" * 600_000, b"c"))
    writer, reader = os.open(path, os.O_RDWR | os.O_CREAT), os.open(path, os.O_RDONLY)
    read: list[bytes] = []
    offset = 0
    for size in (0, 5, 14, 300_000, 600_020, len(data)):
        write_whole_at(writer, data[:size], 0)
        for body, end in follow(reader, offset):
            read.append(body)
            offset = end
    assert read == [b"a", b"b" * 600_000, b"c"]
    assert offset == len(data)
    os.close(writer)
    os.close(reader)
