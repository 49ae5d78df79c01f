"""What a job's journal tells to the driver that takes the job over; journal.py writes it."""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch import __version__
from hvlaunch.driver.record.journal import APPLICATION, FORMAT, checksum
from hvlaunch.engine.codec import BadData, decode
from hvlaunch.engine.entries import Begin, begin_of
from hvlaunch.engine.events import Event
from hvlaunch.errors import EXIT_HOSTS, HvlaunchError
from hvlaunch.owners import other_writer

__all__ = [
    "ForeignJournal",
    "NoJournal",
    "OtherVersion",
    "Past",
    "PastDriver",
    "PastTurn",
    "TornJournal",
    "read_past",
]

_HINT = "start the job again: the workers that it had end by themselves"
_BEFORE_ANYTHING = "journal {}: its driver was killed before anything had happened"


class NoJournal(HvlaunchError):
    """Nothing of the job was kept, or no more could be."""

    exit_code = EXIT_HOSTS


class ForeignJournal(HvlaunchError):
    """The file is no journal of hvlaunch's, or another user can change it."""

    exit_code = EXIT_HOSTS


class OtherVersion(HvlaunchError):
    """Another hvlaunch has begun the job, and decides otherwise."""

    exit_code = EXIT_HOSTS


class TornJournal(HvlaunchError):
    """What is in the journal can't be all that was written."""

    exit_code = EXIT_HOSTS


class PastDriver(NamedTuple):
    """One of the drivers that the job had."""

    epoch: int
    turn: int
    """The number of its first turn."""
    shift: float
    """Its clock was the machine's monotonic one, and so much more."""
    boot: str
    wall: float
    """When it began, in seconds since 1970."""


class PastTurn(NamedTuple):
    """One event, and what it was made of: the link and the number of a frame, or the version of a change at the rendezvous."""

    at: float
    event: Event
    digest: int
    """Of what the engine decided."""
    link: int | None
    frame: int | None
    offset: float | None
    version: int | None
    wall: float
    """When it was, in seconds since 1970."""


class Past(NamedTuple):
    """All that was."""

    begin: Begin
    drivers: tuple[PastDriver, ...]
    turns: tuple[PastTurn, ...]
    hellos: Mapping[int, Mapping[str, Any]]
    """What agents were greeted with, less what is secret, by the numbers of their links."""

    @property
    def version(self) -> int:
        """That of the newest change at the rendezvous which has led to an event."""
        return max((turn.version or 0 for turn in self.turns), default=0)

    def shift(self, boot: str, monotonic: float, wall: float) -> float:
        """What makes the clock go on where it was, of machine that has booted so, and of which the clocks show this."""
        last = self.drivers[-1]
        if boot and boot == last.boot:
            return last.shift
        return self.turns[-1].at + max(0.0, wall - self.turns[-1].wall) - monotonic


def read_past(path: Path) -> Past:
    """The whole journal. Raises NoJournal, ForeignJournal, OtherVersion, TornJournal."""
    _look_at(path)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = OFF")
            _check_format(path, database)
            return _read(path, database)
    except (sqlite3.Error, BadData, ValueError, TypeError) as error:
        raise TornJournal(f"journal {path}: {error}", hint=_HINT) from None


def _look_at(path: Path) -> None:
    """Raises NoJournal, ForeignJournal."""
    try:
        found = os.lstat(path)
        writer = other_writer(found)
        if writer is not None or not os.path.isfile(path) or os.path.islink(path):  # noqa: PTH113, PTH114
            raise ForeignJournal(f"journal {path}: {writer or 'not a file'}")
    except OSError as error:
        cause = os.strerror(error.errno or 0).lower()
        raise NoJournal(f"journal {path}: {cause}", hint=_HINT) from None


def _check_format(path: Path, database: sqlite3.Connection) -> None:
    """Raises NoJournal, ForeignJournal, OtherVersion."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (form,) = database.execute("PRAGMA user_version").fetchone()
    if not application and not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise NoJournal(_BEFORE_ANYTHING.format(path), hint=_HINT)
    if application != APPLICATION:
        raise ForeignJournal(f"journal {path}: it is not one of hvlaunch's")
    if form != FORMAT:
        cause = f"journal {path}: format {form}; this hvlaunch knows format {FORMAT}"
        raise OtherVersion(cause, hint="the very program that began the job")


def _read(path: Path, database: sqlite3.Connection) -> Past:
    """Raises OtherVersion, TornJournal, sqlite3.Error, ValueError, TypeError."""
    [(entry,)] = _rows(path, database, "begin")
    begin = begin_of(json.loads(entry))
    if begin.version != __version__:
        cause = f"job {begin.job_id}: hvlaunch {begin.version} has begun it, and this is {__version__}"
        raise OtherVersion(cause, hint="the same version")
    drivers = tuple(PastDriver(*row) for row in _rows(path, database, "drivers"))
    hellos = {link: json.loads(header) for link, header in _rows(path, database, "hellos")}
    turns = []
    for number, (count, at, event, *others) in enumerate(_rows(path, database, "turns")):
        if count != number:
            raise TornJournal(f"journal {path}: turn {number} is missing", hint=_HINT)
        turns.append(PastTurn(at, decode(Event, json.loads(event)), *others))
    if not turns:
        raise NoJournal(_BEFORE_ANYTHING.format(path), hint=_HINT)
    if not drivers:
        raise TornJournal(f"journal {path}: it has no driver", hint=_HINT)
    return Past(begin, drivers, tuple(turns), hellos)


def _rows(path: Path, database: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """All of a table, in the order of its first column. Raises TornJournal, sqlite3.Error."""
    for *row, check in database.execute(f"SELECT * FROM {table} ORDER BY 1"):  # noqa: S608 (its name is ours)
        if check != checksum(tuple(row)):
            raise TornJournal(
                f"journal {path}: a row of {table} is not as it was written: {row[:1]}", hint=_HINT
            )
        yield tuple(row)
