"""What a driver that takes a job over finds in its journal, or does not."""

import errno
import itertools
import json
import os
import random
import signal
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvlaunch import __version__
from hvlaunch.driver.job_record import (
    JOURNAL,
    ForeignJournal,
    JobRecord,
    Journal,
    NoJournal,
    OtherVersion,
    TornJournal,
    digest,
    read_past,
)
from hvlaunch.driver.program import Keys
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import begin_entry
from hvlaunch.record import Log, Mark, read_records
from tests.unit.gloo.history import spec

JOB = spec("a:1", env={"TOKEN": "of-the-user"})


class Source:
    def __init__(self) -> None:
        self.number = 3
        self.offset: float | None = 0.5
        self.hello: Mapping[str, Any] = {"type": "hello"}

    def acknowledge(self, frame: int) -> None:
        """Nobody sends here."""


def turn(at: float, event: on.Event, *actions: do.Action, frame: int = 0, version: int = 0) -> Turn:
    return Turn(at, Arrival(event, Source() if frame else None, frame, version), actions)


def written(tmp_path: Path, say=pytest.fail) -> Journal:
    """A journal of three turns."""
    journal = Journal(tmp_path / JOURNAL, say)
    journal.begin(begin_entry(__version__, "j0b", JOB, 4711, "/home"))
    journal.write([turn(1.0, on.Began(), do.Release("a"))], {})
    journal.write(
        [
            turn(2.0, on.WorkerStarted("a", 0, 0, 9), frame=4),
            turn(3.0, on.WorkerBeat("a", 0, 0, 1), version=8),
        ],
        {3: {"type": "hello", "ports": None}},
    )
    return journal


MAGIC = b"hvlaunch journal 5\n"
DRIVER = '["driver",1,0.0,"boot",5.0]'
BEGIN = json.dumps(["begin", begin_entry(__version__, "j0b", JOB, 4711, "/home")])
TURN = '["turn",1.0,{"is":"Tick"},0,null,null,null,null,5.0]'


def rows(tmp_path: Path, *records: str) -> Path:
    """A journal with these records, whose checksums are right."""
    log = Log.create(tmp_path / JOURNAL, MAGIC)
    for record in records:
        log.append([f"[{record}]".encode()])
    return log.path


def edited(tmp_path: Path, old: bytes, new: bytes) -> Path:
    """A journal of four turns in which bytes of the first record that has them are others."""
    journal = written(tmp_path)
    journal.write([turn(4.0, on.Tick())], {})
    content = (tmp_path / JOURNAL).read_bytes()
    assert old in content
    (tmp_path / JOURNAL).write_bytes(content.replace(old, new, 1))
    return tmp_path / JOURNAL


def test_written_turns_are_read(tmp_path: Path) -> None:
    written(tmp_path)  # which its driver does not close when it is killed
    past = read_past(tmp_path / JOURNAL)
    assert past.begin.spec == JOB
    assert (past.begin.job_id, past.begin.rendezvous_port, past.begin.cwd) == ("j0b", 4711, "/home")
    assert [one.event for one in past.turns] == [
        on.Began(),
        on.WorkerStarted("a", 0, 0, 9),
        on.WorkerBeat("a", 0, 0, 1),
    ]
    assert [(one.at, one.link, one.frame, one.offset, one.version) for one in past.turns] == [
        (1.0, None, None, None, None),
        (2.0, 3, 4, 0.5, None),
        (3.0, None, None, None, 8),
    ]
    assert past.turns[0].digest == digest([do.Release("b")]) != digest([])
    assert past.hellos == {3: {"type": "hello", "ports": None}}
    assert past.version == 8


def test_journal_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_successor_continues_the_journal(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path / JOURNAL, pytest.fail, end=read_past(tmp_path / JOURNAL).end)
    journal.take_over(2, 7.0)
    journal.write([turn(4.0, on.Tick())], {})
    past = read_past(tmp_path / JOURNAL)
    assert len(past.turns) == 4
    assert [(driver.epoch, driver.turn, driver.shift) for driver in past.drivers] == [
        (1, 0, 0.0),
        (2, 3, 7.0),
    ]


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        (b"hvlaunch journal", b"another program!", ForeignJournal, "not one of hvlaunch's"),
        (
            b"journal 5\n",
            b"journal 99\n",
            OtherVersion,
            "format 99; this hvlaunch knows format 5; try: the same version",
        ),
        (b"of-the-user", b"of-Xhe-user", TornJournal, "it is damaged: a checksum is wrong"),
        (b'"driver",1,0.0', b'"driver",1,1.5', TornJournal, "a checksum is wrong"),
        (b"WorkerStarted", b"WorkerExited_", TornJournal, "a checksum is wrong"),
        (b'"turn",2.0', b'"turn",2.5', TornJournal, "a checksum is wrong"),
        (b",3,4,0.5,", b",3,5,0.5,", TornJournal, "a checksum is wrong"),
        (b'"ports"', b'"sport"', TornJournal, "a checksum is wrong"),
    ],
)
def test_a_damaged_journal_is_refused_with_a_reason(
    tmp_path: Path, old: bytes, new: bytes, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_past(edited(tmp_path, old, new))


@pytest.mark.parametrize(
    ("records", "error", "words"),
    [
        ([f"{BEGIN},{DRIVER}", TURN], None, ""),
        ([BEGIN, TURN], TornJournal, "no driver"),
        ([DRIVER, TURN], TornJournal, "no beginning"),
        ([f"{BEGIN},{DRIVER}", TURN, '["hello",1]'], TornJournal, "journal"),
        ([f"{BEGIN},{DRIVER}", TURN, "[1"], TornJournal, "journal"),
        ([f"{BEGIN},{DRIVER}", TURN, '["songs"]'], TornJournal, "a row of kind 'songs'"),
        ([f"{BEGIN},{DRIVER}"], NoJournal, "before the first event"),
    ],
)
def test_an_incomplete_journal_is_refused(
    tmp_path: Path, records: list[str], error: "type[Exception] | None", words: str
) -> None:
    path = rows(tmp_path, *records)
    if error is None:
        assert [one.event for one in read_past(path).turns] == [on.Tick()]
        return
    with pytest.raises(error, match=words):
        read_past(path)


@pytest.mark.parametrize("change", [lambda parts: parts.pop(1), lambda parts: parts.insert(1, parts[2])])
def test_a_record_that_is_missing_or_doubled_is_noticed(
    tmp_path: Path, change: Callable[[list[bytes]], None]
) -> None:
    journal = written(tmp_path)
    journal.write([turn(4.0, on.Tick())], {})
    content = (tmp_path / JOURNAL).read_bytes()
    ends = [len(MAGIC), *(mark.size for _, mark in read_records(memoryview(content), Mark(len(MAGIC))))]
    records = [content[start:end] for start, end in itertools.pairwise(ends)]
    change(records)
    (tmp_path / JOURNAL).write_bytes(MAGIC + b"".join(records))
    with pytest.raises(TornJournal, match="a checksum is wrong"):
        read_past(tmp_path / JOURNAL)


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL, pytest.fail)
    journal.begin(begin_entry("0.0.1", "j0b", JOB, 4711, "/home"))
    with pytest.raises(OtherVersion, match=r"0\.0\.1 has begun it"):
        read_past(tmp_path / JOURNAL)


def test_a_missing_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoJournal, match="no such file"):
        read_past(tmp_path / JOURNAL)


@pytest.mark.parametrize("content", [b"", MAGIC[:5], MAGIC])
def test_a_driver_killed_while_creating_the_journal_had_not_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    (tmp_path / JOURNAL).chmod(0o600)
    with pytest.raises(NoJournal, match="before the first event"):
        read_past(tmp_path / JOURNAL)


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"something else\n" * 1000)
    (tmp_path / JOURNAL).chmod(0o600)
    with pytest.raises(ForeignJournal, match="not one of hvlaunch's"):
        read_past(tmp_path / JOURNAL)


def test_a_journal_writable_by_others_is_refused(tmp_path: Path) -> None:
    written(tmp_path).close()
    (tmp_path / JOURNAL).chmod(0o666)
    with pytest.raises(ForeignJournal, match="every user of this machine can change it"):
        read_past(tmp_path / JOURNAL)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path).close()
    (tmp_path / "link").symlink_to(tmp_path / JOURNAL)
    with pytest.raises(ForeignJournal, match="link"):
        read_past(tmp_path / "link")


class LongJournal:
    """One of many records."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        journal = written(directory)
        self.begin = len((directory / JOURNAL).read_bytes())
        """Bytes of the first three turns."""
        for number in range(60):
            noise = turn(4.0 + number, on.HostNoise("a", "x" * 200))
            journal.write([noise], {4 + number: {"type": "hello"}})
        self.content = (directory / JOURNAL).read_bytes()
        self._past = read_past(directory / JOURNAL)
        self._copy = directory.with_name("copy")

    def found(self, content: bytes) -> int:
        """How many of the first turns there are; -1 where it is refused."""
        self._copy.write_bytes(content)
        self._copy.chmod(0o600)
        try:
            past = read_past(self._copy)
        except (ForeignJournal, TornJournal, NoJournal, OtherVersion):
            return -1
        assert past.turns == self._past.turns[: len(past.turns)]
        assert past.drivers == self._past.drivers
        assert past.hellos.items() <= self._past.hellos.items()
        return len(past.turns)


def test_a_damaged_journal_has_the_first_turns_or_is_refused(tmp_path: Path) -> None:
    """As after a loss of power: it is cut at any byte, its last page is torn, bytes are others."""
    chance = random.Random(7)
    journal = LongJournal(tmp_path / "job")
    content = journal.content
    assert journal.found(content) == 63
    sizes = chance.sample(range(journal.begin, len(content)), 60)
    cuts = {journal.found(content[:size]) for size in sizes}
    assert -1 not in cuts
    assert len(cuts) > 5
    for size in sizes:  # of the last page that the disk has, a part is zeros
        assert journal.found(content[:size].ljust(len(content), b"\0")) in {
            journal.found(content[:size]),
            -1,
        }
    counts = set()
    for number in range(150):
        damaged, size = bytearray(content), chance.choice([1, 8, 512]) if number else 8
        # The first time in the last record, which is small.
        begin = chance.randrange(len(damaged) - size) if number else len(damaged) - size
        damaged[begin : begin + size] = bytes(chance.choices(b'0123abc{",', k=size))
        if damaged != content:
            counts.add(journal.found(bytes(damaged)))
    assert counts == {-1, 62}  # the last record counts as one whose writer was killed


class FullDisk:
    """After so many bytes it takes no more; `room` can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.write)

    def write(self, descriptor: int, data: bytes, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = self._real(descriptor, bytes(data[: self.room]), offset)
        self.room -= size
        return size


@pytest.mark.parametrize("room", [0, 1, 400, 5000])
def test_a_full_disk_ends_the_journal_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    said: list[str] = []
    journal = written(tmp_path, said.append)
    FullDisk(monkeypatch, room)
    for number in range(200):
        journal.write([turn(4.0 + number, on.HostNoise("a", "x" * 500))], {})
    assert said == [f"journal {tmp_path / JOURNAL}: no space left on device"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoJournal):
        read_past(tmp_path / JOURNAL)


def test_a_full_disk_leaves_idle_turns_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvlaunch.driver.job_record._MOST_IDLE", 50)
    journal = written(tmp_path)
    journal.write([turn(4.0, on.Tick())._replace(is_idle=True)] * 60, {})
    disk = FullDisk(monkeypatch, 100)
    assert journal.should_compact(1)
    journal.compact(on.Lull())
    assert not journal.should_compact(1)
    assert list(tmp_path.iterdir()) == [tmp_path / JOURNAL]
    disk.room = 1 << 20
    journal.write([turn(5.0, on.Tick())], {})
    assert len(read_past(tmp_path / JOURNAL).turns) == 64
    journal.write([turn(6.0, on.Tick())._replace(is_idle=True)] * 60, {})
    journal.compact(on.Lull())
    assert len(read_past(tmp_path / JOURNAL).turns) == 65


def test_a_driver_killed_during_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its system calls."""
    monkeypatch.setattr("hvlaunch.driver.job_record._MOST_IDLE", 50)
    for name in ("pwrite", "fdatasync", "rename"):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / JOURNAL
        journal = Journal(path, pytest.fail, is_synced=True)
        journal.begin(begin_entry(__version__, "j0b", JOB, 4711, "/home"))
        journal.write([turn(4.0, on.Tick())._replace(is_idle=True)] * 60, {})
        child = os.fork()
        if not child:
            monkeypatch.setattr(os, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            journal.compact(on.Lull())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        past = read_past(path)
        assert len(past.turns) == 60
        again = Journal(path, pytest.fail, end=past.end)
        again.write([turn(4.0, on.Tick())._replace(is_idle=True)] * 60, {})
        again.compact(on.Lull())
        assert len(read_past(path).turns) == 61


def test_idle_turns_do_not_grow_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvlaunch.driver.job_record._MOST_IDLE", 50)
    workers = 2
    journal = written(tmp_path)
    for number in range(1000):
        beat = turn(4.0 + number, on.WorkerBeat("a", 0, 0, number), version=9 + number)
        journal.write([beat._replace(is_idle=True)], {})
        if journal.should_compact(workers):
            journal.compact(on.Lull((on.Sign("a", 0, number, 4.0 + number),)))
    journal.write([turn(2000.0, on.Tick(), do.Release("a"))], {})
    past = read_past(tmp_path / JOURNAL)
    assert len(past.turns) < 60
    assert [type(one.event) for one in past.turns[3:6]] == [on.Lull, on.WorkerBeat, on.WorkerBeat]
    assert isinstance(past.turns[3].event, on.Lull)
    [sign] = past.turns[3].event.signs
    assert past.turns[3].at == sign.beat_at == past.turns[4].at - 1
    assert past.turns[3].version == past.turns[4].version - 1  # type: ignore[operator]
    assert past.turns[-1].event == on.Tick()


def test_more_workers_mean_later_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvlaunch.driver.job_record._MOST_IDLE", 50)
    journal = written(tmp_path)
    journal.write([turn(4.0, on.Tick())._replace(is_idle=True)] * 100, {})
    assert journal.should_compact(6)
    assert not journal.should_compact(7)


def test_an_impossible_takeover_is_reported_once(tmp_path: Path) -> None:
    said: list[str] = []
    keeping = JobRecord(tmp_path, said.append)
    keeping.begin(JOB, Keys.new(), 4711)
    keeping.write([turn(1.0, on.Began())], {})
    assert len(read_past(tmp_path / JOURNAL).turns) == 1
    assert keeping.store_file.lost is not None
    keeping.store_file.lost("the disk is full")
    keeping.write([turn(2.0, on.Tick())], {})
    keeping.lose("again")
    assert said == ["warning: the disk is full: the job continues, and ends if hvlaunch is killed"]
    with pytest.raises(NoJournal):
        read_past(tmp_path / JOURNAL)


def test_a_successor_continues_the_clock(tmp_path: Path) -> None:
    written(tmp_path)
    past = read_past(tmp_path / JOURNAL)
    boot = past.drivers[0].boot
    assert past.shift(boot, 50.0, past.turns[-1].wall + 10) == 0.0
    assert past.shift("another boot", 5.0, past.turns[-1].wall + 10) + 5.0 == pytest.approx(3.0 + 10)
    assert past.shift("another boot", 5.0, past.turns[-1].wall - 99) + 5.0 == pytest.approx(3.0)
