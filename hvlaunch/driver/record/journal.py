"""A job's journal: each event, on disk before anything follows of it. By it another driver can take the job over.

SQLite's write-ahead log survives the death of the process; that of the machine only with `is_synced`. What was
not committed is not there. past.py reads it; docs/architecture.md, "The journal", has the tables.
"""

import json
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvlaunch.agent.quick import dumps
from hvlaunch.boot import boot_id
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine.actions import Action
from hvlaunch.engine.codec import BadData, encode
from hvlaunch.engine.entries import Entry
from hvlaunch.engine.events import Event, Lull

__all__ = [
    "APPLICATION",
    "FORMAT",
    "JOURNAL",
    "Journal",
    "checksum",
    "digest",
]

JOURNAL = "journal.db"
APPLICATION = 0x68766C6A
"""What SQLite keeps in the file's header, so that no other program's database is taken for a journal."""
FORMAT = 3
_BUSY = 2.0
_MOST_IDLE = 4096
"""Turns, at least, that the newest may be idle before one takes their place."""
_IDLE_PER_WORKER = 16
"""The same, for each worker: what one turn says in their place is as long as there are workers."""
_TABLES = """
CREATE TABLE begin(entry TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE drivers(
    epoch INTEGER PRIMARY KEY, turn INTEGER NOT NULL, shift REAL NOT NULL, boot TEXT NOT NULL, wall REAL NOT NULL,
    checksum INTEGER NOT NULL);
CREATE TABLE hellos(link INTEGER PRIMARY KEY, header TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE turns(
    number INTEGER PRIMARY KEY, at REAL NOT NULL, event TEXT NOT NULL, actions INTEGER NOT NULL,
    link INTEGER, frame INTEGER, offset REAL, version INTEGER, wall REAL NOT NULL, checksum INTEGER NOT NULL);
"""
_INSERT = "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_NEWEST_OF = "SELECT max(at), max(version), max(wall) FROM turns WHERE number >= ?"


def digest(actions: Iterable[Action]) -> int:
    """By which a replay knows that an engine decides as before: which actions there were, in their order."""
    return zlib.crc32(",".join(action.__class__.__name__ for action in actions).encode())


def _row(number: int, turn: Turn, wall: float) -> tuple[Any, ...]:
    """Raises BadData."""
    event = dumps(encode(Event, turn.arrival.event))
    return _checked(number, turn.at, event, digest(turn.actions), *_origin(turn.arrival), wall)


def _origin(arrival: Arrival) -> tuple[int | None, int | None, float | None, int | None]:
    source = arrival.source
    if source is None:
        return None, None, None, arrival.version or None
    return source.number, arrival.frame, source.offset, None


def checksum(row: tuple[Any, ...]) -> int:
    """The last column of each row, of all others."""
    return zlib.crc32(repr(row).encode())


def _checked(*row: Any) -> tuple[Any, ...]:
    return *row, checksum(row)


class Journal:
    """Writes. All by one thread.

    Where no more can be written the journal is removed, and `lost` is told why: with a gap it would tell of another job.
    """

    def __init__(
        self, path: Path, lost: Callable[[str], None], *, is_synced: bool = False, turns: int = 0
    ) -> None:
        """Of a new job, or of one of which `turns` are there already. Raises OSError."""
        if not turns:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._path = path
        self._lost = lost
        self._turns = turns
        self._idle = 0
        """How many of the newest turns were idle."""
        self.is_whole = True
        self._database = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'OFF'}")

    def begin(self, entry: Entry) -> None:
        """The first entry of a new journal."""

        def write() -> None:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(
                f"BEGIN; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {FORMAT}; {_TABLES}"
            )
            self._database.execute("INSERT INTO begin VALUES (?, ?)", _checked(json.dumps(entry)))
            self._add_driver(1, 0.0)
            self._database.execute("COMMIT")

        self._try(write)

    def take_over(self, epoch: int, shift: float) -> None:
        """Another driver goes on from here; its clock is the machine's monotonic one and `shift`."""
        self._try(lambda: self._add_driver(epoch, shift))

    def write(self, turns: Sequence[Turn], hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Further turns, all or none, and what agents were greeted with, by their links."""
        try:
            wall = time.time()
            rows = [_row(number, turn, wall) for number, turn in enumerate(turns, self._turns)]
        except BadData as error:
            self.end(str(error))
            return
        self._turns += len(rows)
        for turn in turns:
            self._idle = self._idle + 1 if turn.is_idle else 0
        new = [_checked(link, dumps(header)) for link, header in hellos.items()]

        def write() -> None:
            self._database.execute("BEGIN")
            if new:
                self._database.executemany("INSERT OR REPLACE INTO hellos VALUES (?, ?, ?)", new)
            self._database.executemany(_INSERT, rows)
            self._database.execute("COMMIT")

        self._try(write)

    def is_to_be_folded(self, workers: int) -> bool:
        """Whether so many of the newest turns were idle that one should take their place, where there are so many workers."""
        return self._idle >= max(_MOST_IDLE, _IDLE_PER_WORKER * workers)

    def fold(self, lull: Lull) -> None:
        """The newest turns, which were idle, come to this."""
        first = self._turns - self._idle
        event = dumps(encode(Event, lull))

        def write() -> None:
            self._database.execute("BEGIN")
            found = self._database.execute(_NEWEST_OF, (first,)).fetchone()
            self._database.execute("DELETE FROM turns WHERE number >= ?", (first,))
            at, version, wall = found
            row = _checked(first, at, event, digest(()), None, None, None, version, wall)
            self._database.execute(_INSERT, row)
            self._database.execute("COMMIT")

        self._try(write)
        self._turns, self._idle = first + 1, 1

    def close(self) -> None:
        self._database.close()

    def _add_driver(self, epoch: int, shift: float) -> None:
        row = _checked(epoch, self._turns, shift, boot_id(), time.time())
        self._database.execute("INSERT INTO drivers VALUES (?, ?, ?, ?, ?, ?)", row)

    def _try(self, write: Callable[[], None]) -> None:
        if not self.is_whole:
            return
        try:
            write()
        except sqlite3.Error as error:
            self.end(str(error))

    def end(self, cause: str) -> None:
        """Remove it: nobody can go on from it. May be repeated."""
        if not self.is_whole:
            return
        self.is_whole = False
        self._database.close()
        for name in (
            self._path,
            *(self._path.with_name(f"{self._path.name}-{end}") for end in ("wal", "shm")),
        ):
            name.unlink(missing_ok=True)
        self._lost(f"journal {self._path}: {cause}")
