"""A job's journal: each event is on disk before its actions are carried out, for a successor of the driver.

A record of the log is a JSON array of rows. The first item of a row is its kind: `begin`, `driver`, `hello` or `turn`.
The successor reads all of them, and its replay must decide as the killed driver did.
"""

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch import __version__
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.driver.turn import Turn
from hvlaunch.engine.actions import Action
from hvlaunch.engine.codec import BadData, decode, encode
from hvlaunch.engine.entries import Begin, Entry, begin_of
from hvlaunch.engine.events import Event, Lull
from hvlaunch.errors import EXIT_HOSTS, HvlaunchError
from hvlaunch.owners import other_writer
from hvlaunch.record import BadLog, Log, Mark, boot_id, read_records

__all__ = [
    "FORMAT",
    "JOURNAL",
    "ForeignJournal",
    "Journal",
    "NoJournal",
    "OtherVersion",
    "Past",
    "PastDriver",
    "PastTurn",
    "Takeover",
    "TornJournal",
    "digest",
    "read_past",
]

JOURNAL = "journal"
FORMAT = 5
_NAME = b"hvlaunch journal "
_MAGIC = _NAME + b"%d\n" % FORMAT
_MOST_IDLE = 4096
"""Idle turns at the end of a journal before a Lull replaces them."""
_IDLE_PER_WORKER = 16
"""The same for each worker, if more: a Lull's size grows with the workers."""
_HINT = "start the job again: the workers that it had end by themselves"
_BEFORE_ANYTHING = "journal {}: its driver was killed before anything had happened"

Row = Sequence[Any]


class NoJournal(HvlaunchError):
    """There is no journal: the job has none, or its disk was full."""

    exit_code = EXIT_HOSTS


class ForeignJournal(HvlaunchError):
    """The file is another program's, or another user can change it."""

    exit_code = EXIT_HOSTS


class OtherVersion(HvlaunchError):
    """Another version of hvlaunch began the job; its engine may decide otherwise."""

    exit_code = EXIT_HOSTS


class TornJournal(HvlaunchError):
    """A part of the journal is missing or damaged."""

    exit_code = EXIT_HOSTS


def digest(actions: Iterable[Action]) -> int:
    """Return a checksum of the actions' kinds and order, for comparison by a replay."""
    return zlib.crc32(",".join(action.__class__.__name__ for action in actions).encode())


class Journal:
    """Writes a journal. For one thread.

    After a failed write, the journal is removed and `lost` gets the reason: a journal with a gap would describe another job.
    """

    def __init__(
        self, path: Path, lost: Callable[[str], None], *, is_synced: bool = False, end: Mark | None = None
    ) -> None:
        """Create a journal for a new job, or continue behind `end`. Raises OSError."""
        self._path = path
        self._lost = lost
        if end is None:
            self._log = Log.create(path, _MAGIC, is_synced=is_synced)
        else:
            self._log = Log.resume(path, end, is_synced=is_synced)
        self.is_whole = True
        self._idle = 0
        """How many turns at the end are idle."""
        self._idle_start = self._log.end
        self._idle_version = 0
        self._idle_at = self._idle_wall = 0.0

    def begin(self, entry: Entry) -> None:
        """Write the first entry of a new journal."""
        self._append([("begin", entry), _driver(1, 0.0)])

    def take_over(self, epoch: int, shift: float) -> None:
        """Record a takeover by another driver; its clock is the machine's monotonic one plus `shift`."""
        self._append([_driver(epoch, shift)])

    def write(self, turns: Sequence[Turn], hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Write further turns, and the greetings of new agents by their links."""
        # A record has a single wall time: its turns were decided within a moment.
        wall = time.time()
        try:
            rows = [_turn(turn, wall) for turn in turns]
        except BadData as error:
            self.give_up(str(error))
            return
        # A record is replaced as a whole, so one that has idle turns has no others.
        idle_from = next((at for at in range(len(turns), 0, -1) if not turns[at - 1].is_idle), 0)
        if idle_from or hellos:
            self._append([*(("hello", link, hello) for link, hello in hellos.items()), *rows[:idle_from]])
            self._begin_idle_run()
        if idle := turns[idle_from:]:
            self._append(rows[idle_from:])
            self._idle += len(idle)
            self._idle_version = max([self._idle_version, *(turn.arrival.version for turn in idle)])
            self._idle_at, self._idle_wall = idle[-1].at, wall

    def should_compact(self, workers: int) -> bool:
        """True if the journal of a job with so many workers ends with enough idle turns for compact()."""
        return self.is_whole and self._idle >= max(_MOST_IDLE, _IDLE_PER_WORKER * workers)

    def compact(self, lull: Lull) -> None:
        """Replace the idle turns at the end by a single event."""
        row = ("turn", self._idle_at, encode(Event, lull), digest(()), None, None, None)
        try:
            self._log.replace(
                self._idle_start, [_record([(*row, self._idle_version or None, self._idle_wall)])]
            )
        except OSError:
            # The old turns are all there still. They stay, and the next run of idle turns is tried.
            self._begin_idle_run()
        else:
            self._idle = 1

    def _begin_idle_run(self) -> None:
        self._idle = self._idle_version = 0
        self._idle_start = self._log.end

    def _append(self, rows: Sequence[Row]) -> None:
        # Removed: the remaining turns of a broken journal are not written.
        if not self.is_whole:
            return
        try:
            self._log.append(_record(rows))
        except OSError as error:
            self.give_up((error.strerror or str(error)).lower())

    def give_up(self, cause: str) -> None:
        """Remove the journal: no driver could continue from it. May be called again."""
        if not self.is_whole:
            return
        self.is_whole = False
        self.close()
        self._path.unlink(missing_ok=True)
        self._lost(f"journal {self._path}: {cause}")

    def close(self) -> None:
        """May be called again."""
        self._log.close()


def _record(rows: Sequence[Row]) -> list[bytes]:
    return [dumps(rows).encode()]


def _driver(epoch: int, shift: float) -> Row:
    return "driver", epoch, shift, boot_id(), time.time()


def _turn(turn: Turn, wall: float) -> Row:
    """Raises BadData."""
    arrival = turn.arrival
    source = arrival.source
    origin: Row = (None, None, None) if source is None else (source.number, arrival.frame, source.offset)
    version = None if source is not None else arrival.version or None
    return "turn", turn.at, encode(Event, arrival.event), digest(turn.actions), *origin, version, wall


class PastDriver(NamedTuple):
    """A driver of the job."""

    epoch: int
    turn: int
    """The number of its first turn."""
    shift: float
    """Its clock was the machine's monotonic one, plus this."""
    boot: str
    wall: float
    """The time of its begin, in seconds since 1970."""


class PastTurn(NamedTuple):
    """An event and its origin: the link and number of a frame, or the version of a change at the rendezvous."""

    at: float
    event: Event
    digest: int
    """Of the engine's actions."""
    link: int | None
    frame: int | None
    offset: float | None
    version: int | None
    wall: float
    """The time of the event, in seconds since 1970."""


class Past(NamedTuple):
    """The whole content of a journal."""

    begin: Begin
    drivers: tuple[PastDriver, ...]
    turns: tuple[PastTurn, ...]
    hellos: Mapping[int, Mapping[str, Any]]
    """Greetings of agents, without secrets, by the numbers of their links."""
    end: Mark
    """Behind the last whole record."""

    @property
    def version(self) -> int:
        """The version of the newest change at the rendezvous with an event."""
        return max((turn.version or 0 for turn in self.turns), default=0)

    def shift(self, boot: str, monotonic: float, wall: float) -> float:
        """Return the offset of this driver's clock, so that its time continues the previous driver's; for this boot id and these clocks."""
        last = self.drivers[-1]
        if boot and boot == last.boot:
            return last.shift
        # Another boot has another monotonic clock: the wall clock tells how long no driver ran.
        return self.turns[-1].at + max(0.0, wall - self.turns[-1].wall) - monotonic


def read_past(path: Path) -> Past:
    """Read a whole journal. Raises NoJournal, ForeignJournal, OtherVersion, TornJournal."""
    try:
        _check_owner(path)
        data = path.read_bytes()
    except OSError as error:
        cause = os.strerror(error.errno or 0).lower()
        raise NoJournal(f"journal {path}: {cause}", hint=_HINT) from None
    _check_format(path, data)
    try:
        return _read(path, data)
    except (BadLog, BadData, LookupError, TypeError, ValueError) as error:
        raise TornJournal(f"journal {path}: it is damaged: {error}", hint=_HINT) from None


def _check_owner(path: Path) -> None:
    """Raises ForeignJournal, OSError."""
    writer = other_writer(path.lstat())
    if writer is not None or path.is_symlink() or not path.is_file():
        raise ForeignJournal(f"journal {path}: {writer or 'not a file'}")


def _check_format(path: Path, data: bytes) -> None:
    """Raises NoJournal, ForeignJournal, OtherVersion."""
    # A driver killed while creating the file leaves a part of the magic, or all of it.
    if _MAGIC.startswith(data):
        raise NoJournal(_BEFORE_ANYTHING.format(path), hint=_HINT)
    number = data[len(_NAME) :].partition(b"\n")[0]
    if not (data.startswith(_NAME) and number.isdigit()):
        raise ForeignJournal(f"journal {path}: it is not one of hvlaunch's")
    if number != b"%d" % FORMAT:
        cause = f"journal {path}: format {number.decode()}; this hvlaunch knows format {FORMAT}"
        raise OtherVersion(cause, hint="the very program that began the job")


def _read(path: Path, data: bytes) -> Past:
    """Raises NoJournal, OtherVersion, BadLog, BadData, LookupError, TypeError, ValueError."""
    begin: Begin | None = None
    drivers: list[PastDriver] = []
    hellos: dict[int, Mapping[str, Any]] = {}
    turns: list[PastTurn] = []
    start = end = Mark(len(_MAGIC))
    for body, end in read_records(memoryview(data), start):  # noqa: B007 (the last mark is the end)
        for kind, *row in loads(str(body, "ascii")):
            if kind == "turn":
                at, event, *others = row
                turns.append(PastTurn(at, decode(Event, event), *others))
            elif kind == "hello":
                link, hellos[link] = row
            elif kind == "driver":
                drivers.append(PastDriver(row[0], len(turns), *row[1:]))
            elif kind == "begin":
                begin = _begin(row[0])
            else:
                raise BadData(f"a row of kind {kind!r}")
    # Before the first turn nothing was started, so nothing has to be taken over.
    if not turns:
        raise NoJournal(_BEFORE_ANYTHING.format(path), hint=_HINT)
    if begin is None or not drivers:
        raise BadData("it has no beginning" if begin is None else "it has no driver")
    return Past(begin, tuple(drivers), tuple(turns), hellos, end)


def _begin(entry: Entry) -> Begin:
    """Raises OtherVersion, BadData."""
    begin = begin_of(entry)
    # Another version's engine may decide otherwise, and its replay would fail midway.
    if begin.version != __version__:
        cause = f"job {begin.job_id}: hvlaunch {begin.version} has begun it, and this is {__version__}"
        raise OtherVersion(cause, hint="the same version")
    return begin


@dataclass
class Takeover:
    """A takeover of a killed driver's job: its past turns, and the clocks of both drivers."""

    past: Past
    is_same_boot: bool
    """True if the machine has not booted since: every write of the killed driver is then in its files."""
    shift: float
    """Seconds from the machine's monotonic clock to the new driver's clock."""
    _now: float | None = None
    """The time of the turn under replay; None outside of a replay."""

    def clock(self) -> float:
        """Return the time of the driver's clock, a continuation of the killed driver's."""
        return time.monotonic() + self.shift

    def wall(self) -> float:
        """Return the time in seconds since 1970; during a replay the time of the replayed turn."""
        return time.time() if self._now is None else self._now

    def turns(self) -> Iterator[tuple[int, PastTurn]]:
        """Yield the past turns with their numbers."""
        # Watchers ask for the time, and must get that of the turn.
        for number, turn in enumerate(self.past.turns):
            self._now = turn.wall
            yield number, turn
        self._now = None

    @property
    def epoch(self) -> int:
        """The new driver's number."""
        return self.past.drivers[-1].epoch + 1

    def check(self, number: int, actions: Sequence[Action]) -> None:
        """Check the engine's actions at this turn against the journal. Raises OtherVersion."""
        # Another version, or another Python, may decide otherwise, and would then act on a state that never was.
        turn = self.past.turns[number]
        if digest(actions) != turn.digest:
            cause = f"job {self.past.begin.job_id}: this hvlaunch decides otherwise at turn {number} ({turn.event})"
            raise OtherVersion(cause, hint="the very program that began the job")
