"""What a driver that takes a job over finds in its journal, or does not."""

import os
import random
import shutil
import sqlite3
import stat
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hvlaunch import __version__
from hvlaunch.driver.program.keys import Keys
from hvlaunch.driver.record.journal import JOURNAL, Journal, digest
from hvlaunch.driver.record.keeping import Keeping
from hvlaunch.driver.record.past import ForeignJournal, NoJournal, OtherVersion, TornJournal, read_past
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.entries import begin_entry
from tests.unit.gloo.history import spec

JOB = spec("a:1", env={"TOKEN": "of-the-user"})


class Source:
    def __init__(self) -> None:
        self.number = 3
        self.offset: float | None = 0.5
        self.hello: Mapping[str, Any] = {"type": "hello"}

    def settle(self, frame: int) -> None:
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


def damaged(tmp_path: Path, statement: str) -> Path:
    written(tmp_path).close()
    with sqlite3.connect(tmp_path / JOURNAL) as database:
        database.execute(statement)
    database.close()
    return tmp_path / JOURNAL


def test_what_was_written_is_read(tmp_path: Path) -> None:
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


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_further_drivers_write_on_behind_it(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path / JOURNAL, pytest.fail, turns=3)
    journal.take_over(2, 7.0)
    journal.write([turn(4.0, on.Tick())], {})
    past = read_past(tmp_path / JOURNAL)
    assert len(past.turns) == 4
    assert [(driver.epoch, driver.turn, driver.shift) for driver in past.drivers] == [
        (1, 0, 0.0),
        (2, 3, 7.0),
    ]


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("PRAGMA application_id = 1", ForeignJournal, "not one of hvlaunch's"),
        (
            "PRAGMA user_version = 99",
            OtherVersion,
            "format 99; this hvlaunch knows format 3; try: the very program",
        ),
        ("UPDATE begin SET entry = replace(entry, 'a', 'b')", TornJournal, "a row of begin is not as"),
        ("UPDATE drivers SET shift = 1.5", TornJournal, "a row of drivers is not as"),
        (
            'UPDATE turns SET event = \'{"is":"Tick"}\' WHERE number = 1',
            TornJournal,
            "a row of turns is not as",
        ),
        ("UPDATE turns SET at = 2.5 WHERE number = 1", TornJournal, "a row of turns is not as"),
        ("UPDATE turns SET frame = 5 WHERE number = 1", TornJournal, "a row of turns is not as"),
        ("DELETE FROM turns WHERE number = 1", TornJournal, "turn 1 is missing"),
        ("DELETE FROM drivers", TornJournal, "no driver"),
        ("DELETE FROM begin", TornJournal, "journal"),
        ("DROP TABLE turns", TornJournal, "no such table"),
        ("UPDATE begin SET entry = '[1'", TornJournal, "journal"),
        ("UPDATE hellos SET header = 'x'", TornJournal, "journal"),
    ],
)
def test_what_can_not_be_gone_on_from_is_said(
    tmp_path: Path, statement: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_past(damaged(tmp_path, statement))


def test_another_version_of_hvlaunch_decides_otherwise(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL, pytest.fail)
    journal.begin(begin_entry("0.0.1", "j0b", JOB, 4711, "/home"))
    with pytest.raises(OtherVersion, match=r"0\.0\.1 has begun it"):
        read_past(tmp_path / JOURNAL)


def test_there_may_be_none(tmp_path: Path) -> None:
    with pytest.raises(NoJournal, match="no such file"):
        read_past(tmp_path / JOURNAL)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_driver_that_was_killed_while_it_made_the_journal_had_not_begun(
    tmp_path: Path, *, is_open: bool
) -> None:
    Journal(tmp_path / JOURNAL, pytest.fail)  # an empty file
    if is_open:
        with closing(sqlite3.connect(tmp_path / JOURNAL)) as database:
            database.execute("PRAGMA journal_mode = WAL")  # a header that is nobody's yet
        assert (tmp_path / JOURNAL).stat().st_size > 0
    with pytest.raises(NoJournal, match="before anything had happened"):
        read_past(tmp_path / JOURNAL)


def test_another_file_is_none(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(b"something else\n" * 1000)
    with pytest.raises(TornJournal, match="journal"):
        read_past(tmp_path / JOURNAL)
    (tmp_path / JOURNAL).unlink()
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as database:
        database.execute("CREATE TABLE songs(name)")
    (tmp_path / JOURNAL).chmod(0o600)
    with pytest.raises(ForeignJournal, match="not one of hvlaunch's"):
        read_past(tmp_path / JOURNAL)


def test_one_that_others_can_change_is_not_believed(tmp_path: Path) -> None:
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
    """One of which a part is in SQLite's log."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        journal = written(directory)
        for number in range(60):
            noise = turn(4.0 + number, on.HostNoise("a", "x" * 200))
            journal.write([noise], {number: {"type": "hello"}})
            if number == 40:
                journal._database.execute("PRAGMA wal_checkpoint(FULL)")
        self.database, self.log = ((directory / name).read_bytes() for name in (JOURNAL, f"{JOURNAL}-wal"))
        self._past = read_past(directory / JOURNAL)
        self._copy = directory.with_name("copy")

    def found(self, database: bytes, log: bytes) -> int:
        """How many of the first turns there are; -1 where it is refused."""
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        (self._copy / JOURNAL).write_bytes(database)
        (self._copy / f"{JOURNAL}-wal").write_bytes(log)
        try:
            past = read_past(self._copy / JOURNAL)
        except (ForeignJournal, TornJournal, NoJournal, OtherVersion):
            return -1
        assert past.turns == self._past.turns[: len(past.turns)]
        assert past.drivers == self._past.drivers
        assert past.hellos.items() <= self._past.hellos.items()
        return len(past.turns)


def test_whatever_is_left_of_it_has_the_first_turns_or_is_refused(tmp_path: Path) -> None:
    """As after a loss of power: its log is cut at any byte, its last page is torn, bytes are others."""
    chance = random.Random(7)
    journal = LongJournal(tmp_path / "job")
    database, log = journal.database, journal.log
    assert journal.found(database, log) == 63
    cuts = {journal.found(database, log[:size]) for size in chance.sample(range(len(log)), 60)}
    assert -1 not in cuts
    assert len(cuts) > 5
    assert {journal.found(database[:-size], log) for size in range(1, len(database), 1021)} <= {-1, 63}
    counts = set()
    for _ in range(150):
        damaged = [bytearray(database), bytearray(log)]
        data, size = chance.choice(damaged), chance.choice([1, 8, 512])
        begin = chance.randrange(len(data) - size)
        data[begin : begin + size] = bytes(chance.choices(b'0123abc{",', k=size))
        counts.add(journal.found(*map(bytes, damaged)))
    assert {-1, 63} < counts


def test_a_disk_that_is_full_ends_it_and_not_the_job(tmp_path: Path) -> None:
    said: list[str] = []
    journal = written(tmp_path, said.append)
    (pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(200):
        journal.write([turn(4.0 + number, on.HostNoise("a", "x" * 500))], {})
    assert len(said) == 1
    assert "database or disk is full" in said[0]
    assert not list(tmp_path.iterdir())
    with pytest.raises(NoJournal):
        read_past(tmp_path / JOURNAL)


def test_what_says_that_nothing_happens_does_not_let_it_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvlaunch.driver.record.journal._MOST_IDLE", 50)
    workers = 2
    journal = written(tmp_path)
    for number in range(1000):
        beat = turn(4.0 + number, on.WorkerBeat("a", 0, 0, number), version=9 + number)
        journal.write([beat._replace(is_idle=True)], {})
        if journal.is_to_be_folded(workers):
            journal.fold(on.Lull((on.Sign("a", 0, number, 4.0 + number),)))
    journal.write([turn(2000.0, on.Tick(), do.Release("a"))], {})
    past = read_past(tmp_path / JOURNAL)
    assert len(past.turns) < 60
    assert [type(one.event) for one in past.turns[3:6]] == [on.Lull, on.WorkerBeat, on.WorkerBeat]
    assert isinstance(past.turns[3].event, on.Lull)
    [sign] = past.turns[3].event.signs
    assert past.turns[3].at == sign.beat_at == past.turns[4].at - 1
    assert past.turns[3].version == past.turns[4].version - 1  # type: ignore[operator]
    assert past.turns[-1].event == on.Tick()


def test_of_many_workers_more_turns_are_kept_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvlaunch.driver.record.journal._MOST_IDLE", 50)
    journal = written(tmp_path)
    journal.write([turn(4.0, on.Tick())._replace(is_idle=True)] * 100, {})
    assert journal.is_to_be_folded(6)
    assert not journal.is_to_be_folded(7)


def test_that_it_can_not_be_taken_over_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    keeping = Keeping(tmp_path, said.append)
    keeping.begin(JOB, Keys.new(), 4711)
    keeping.write([turn(1.0, on.Began())], {})
    assert len(read_past(tmp_path / JOURNAL).turns) == 1
    assert keeping.store_file.lost is not None
    keeping.store_file.lost("the disk is full")
    keeping.write([turn(2.0, on.Tick())], {})
    keeping.lose("again")
    assert said == ["warning: the disk is full: the job goes on, and ends if hvlaunch is killed"]
    with pytest.raises(NoJournal):
        read_past(tmp_path / JOURNAL)


def test_the_clock_goes_on_where_it_was(tmp_path: Path) -> None:
    written(tmp_path)
    past = read_past(tmp_path / JOURNAL)
    boot = past.drivers[0].boot
    assert past.shift(boot, 50.0, past.turns[-1].wall + 10) == 0.0
    assert past.shift("another boot", 5.0, past.turns[-1].wall + 10) + 5.0 == pytest.approx(3.0 + 10)
    assert past.shift("another boot", 5.0, past.turns[-1].wall - 99) + 5.0 == pytest.approx(3.0)
