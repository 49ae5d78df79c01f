"""The record of a running job on disk, for a successor: journal, keys, frames, store of the rendezvous.

Each event is in the journal before its actions are carried out. A record of its log is a JSON array of rows. The first item
of a row is its kind: `begin`, `driver`, `hello` or `turn`. The successor reads all of them, and its replay must decide as
the killed driver did.
"""

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch import __version__
from hvlaunch.agent.quick import dumps, loads
from hvlaunch.console.lines import Stream
from hvlaunch.console.notes import FileSizes, UnfinishedLines
from hvlaunch.driver.program import Keys
from hvlaunch.driver.turn import Turn
from hvlaunch.engine.actions import Action
from hvlaunch.engine.codec import BadData, Begin, Entry, begin_entry, begin_of, decode, encode
from hvlaunch.engine.events import Event, HostReady, Lull
from hvlaunch.errors import EXIT_HOSTS, HvlaunchError
from hvlaunch.job import JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import ABOUT, KEYS, STORE, remove_secrets
from hvlaunch.owners import other_writer
from hvlaunch.record import PAGE, BadLog, Log, Mark, SharedFile, boot_id, read_records
from hvlaunch.rendezvous.serving.store_record import StoreFile

if TYPE_CHECKING:
    from hvlaunch.engine.engine import Engine

__all__ = [
    "FORMAT",
    "FRAMES",
    "JOURNAL",
    "UNFINISHED",
    "ForeignJournal",
    "FrameNumbers",
    "FrameRecord",
    "FrameRecords",
    "JobRecord",
    "Journal",
    "NoJournal",
    "OtherVersion",
    "Past",
    "PastDriver",
    "PastTurn",
    "Takeover",
    "TornJournal",
    "TurnRecord",
    "digest",
    "forget",
    "read_past",
]

FRAMES = "seen"
_FIELDS = 4
"""Numbers of 8 bytes per link: three of FrameNumbers and a spare, so no link spans two pages."""
_LINKS_PER_PAGE = PAGE // (8 * _FIELDS)
_INDEXES: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def _no_need() -> None:
    pass


class FrameNumbers(NamedTuple):
    """Frame numbers of a link in its lasting stream."""

    acked: int = 0
    """The agent may have forgotten every frame up to here."""
    stdout: int = 0
    """The last frame whose output was printed."""
    stderr: int = 0


class FrameRecords:
    """The numbers of all links. For any thread.

    A number is written before its acknowledgement is sent, and outlives the process. On a full disk numbers are lost: the
    journal fails too, and tells the user.
    """

    def __init__(self, path: Path, *, is_synced: bool = False) -> None:
        """With `is_synced`, acknowledgements outlive the machine too. Raises OSError."""
        self._is_synced = is_synced
        self._file = SharedFile(path)
        self._lock = threading.Lock()
        self._pages: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        """Each with its sync function."""

    def of_link(self, link: int) -> "FrameRecord":
        number, index = divmod(link, _LINKS_PER_PAGE)
        with self._lock:
            if number not in self._pages:
                self._pages[number] = self._page(number)
            page, sync = self._pages[number]
            # Each link has its own slice: threads of different links need no common lock.
            return FrameRecord(page[_FIELDS * index : _FIELDS * (index + 1)], sync)

    def _page(self, number: int) -> tuple[memoryview, Callable[[], object]]:
        try:
            # Shared memory, since a system call for each printed line is a tenth of the cost of printing.
            shared = self._file.map(number * PAGE, PAGE)
            return memoryview(shared).cast("Q"), shared.flush if self._is_synced else _no_need
        # Private memory instead: the job goes on without a record.
        except OSError:
            return memoryview(bytearray(PAGE)).cast("Q"), _no_need

    def close(self) -> None:
        self._file.close()


class FrameRecord:
    """The numbers of a link. acknowledge() is for any thread, the other methods for the printer's."""

    def __init__(self, memory: memoryview, sync: Callable[[], object] = _no_need) -> None:
        self._memory = memory
        self._sync = sync
        self._lock = threading.Lock()

    @property
    def numbers(self) -> FrameNumbers:
        return FrameNumbers(*self._memory[: len(FrameNumbers._fields)])

    def acknowledge(self, number: int) -> None:
        """Record an acknowledgement, right before the agent gets it and forgets the frames."""
        with self._lock:
            if number > self._memory[0]:
                self._memory[0] = number
                with suppress(OSError):  # the journal reports a disk that fails
                    self._sync()

    def record_printed(self, stream: Stream, number: int) -> None:
        """Record the output of this frame as printed: it is, or will be in the next moment."""
        self._set(_INDEXES[stream], number)

    def take_back(self, stream: Stream, number: int) -> None:
        """Record the output of this frame, and of later ones, as not printed."""
        index = _INDEXES[stream]
        self._memory[index] = min(self._memory[index], number - 1)

    def _set(self, index: int, number: int) -> None:
        self._memory[index] = max(self._memory[index], number)


FILES = "files"
UNFINISHED = "unfinished"
_LAST_PATIENCE = 3600.0
_MOST_AT_ONCE = 256
_SECRETS = ("key", "session")


class JobRecord:
    """Files in the job's directory. `say` warns the user, once, when a takeover becomes impossible."""

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        *,
        is_synced: bool = False,
        past: "Past | None" = None,
    ) -> None:
        """Begin the record of a new job, or continue the record of this past. Raises OSError, BadStoreFile."""
        self._directory = directory
        self._say: Callable[[str], None] | None = say
        self.is_whole = True
        """True if another driver could take the job over."""
        self._is_synced = is_synced
        self._frames = FrameRecords(directory / FRAMES, is_synced=is_synced)
        self.unfinished = UnfinishedLines(directory / UNFINISHED)
        begin = StoreFile.create if past is None else StoreFile.open
        self.store_file = begin(directory / STORE, sync=is_synced)
        """The content of the rendezvous."""
        # A successor needs both: the loss of either is the loss of the record.
        self.store_file.lost = self.lose
        self._journal: Journal | None = None

    def frames(self, link: int) -> FrameRecord:
        """Return the record of this link's frames."""
        return self._frames.of_link(link)

    def sizes(self, number: int, ranks: int, *, is_known: bool) -> FileSizes | None:
        """Return the sizes of this round's output files, and remove those of earlier rounds; None on errors of the disk."""
        path = self._directory / f"{FILES}.{number}"
        try:
            for other in self._directory.glob(f"{FILES}.*"):
                if other != path:
                    other.unlink()
            return FileSizes(path, ranks, is_known=is_known and path.exists())
        except OSError:
            return None

    @property
    def has_begun(self) -> bool:
        """True if the journal exists, or never will."""
        return self._journal is not None or not self.is_whole

    def begin(self, spec: JobSpec, keys: Keys, port: int) -> None:
        """Save the keys, and begin the journal."""
        try:
            # The keys first: a journal without them looks like a job that can be taken over.
            keys.save(self._directory / KEYS, spec.env)
            if self._is_synced:
                _sync(self._directory, ABOUT, KEYS)
            self._journal = Journal(self._directory / JOURNAL, self.lose, is_synced=self._is_synced)
            # The journal stays when the job has ended, so it has no secrets.
            bare = replace(spec, env={})
            self._journal.begin(begin_entry(__version__, keys.job_id, bare, port, str(Path.cwd())))
        except (OSError, BadData) as error:
            self.lose(f"{self._directory}: {error}")

    def resume(self, past: "Past", epoch: int, shift: float) -> None:
        """Continue the journal behind its past, as another driver. Raises OSError."""
        path = self._directory / JOURNAL
        self._journal = Journal(path, self.lose, is_synced=self._is_synced, end=past.end)
        self._journal.take_over(epoch, shift)

    def renew(self, seconds: float = 0.0) -> bool:
        """Renew the time of the keys, a sign of life; return True if another driver could take the job over.

        `seconds` is the time without a further call.
        """
        until = time.time() + seconds
        with suppress(OSError):
            # Not the time of the file's server, whose clock may be another.
            os.utime(self._directory / KEYS, (until, until))
        return self.is_whole

    def write(self, turns: "Sequence[Turn]", hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Write further turns for a successor."""
        if self._journal is not None:
            self._journal.write(turns, hellos)
            # The journal alone is of no use: without the rendezvous' store a successor must not continue.
            if not self.is_whole:
                self._journal.give_up("the rest is not whole")

    def lose(self, cause: str) -> None:
        """Warn the user, once, about an impossible takeover. For any thread."""
        # Set before the message: another thread may ask at any moment.
        self.is_whole = False
        say, self._say = self._say, None
        if say is not None:
            say(f"warning: {cause}: the job continues, and ends if hvlaunch is killed")

    def compact(self, engine: "Engine") -> None:
        """Replace many idle turns by a single turn. Call when every turn of the engine is written."""
        if self._journal is not None and self._journal.should_compact(engine.workers.size):
            self._journal.compact(engine.idle_summary())

    def close(self) -> None:
        """Close the files when the job has ended. They stay until its end is on disk: see forget()."""
        # The end of the job may wait for a slow reader of its output. A successor can still tell the exit code.
        self.renew(_LAST_PATIENCE)
        self._frames.close()
        if self._journal is not None:
            self._journal.close()


def _sync(directory: Path, *names: str) -> None:
    """Return when the disk has these files, and the directory in its place. Raises OSError."""
    # The parents too: after a loss of power a new directory may be missing in its parent.
    root = directory.parent
    for path in (*(directory / name for name in names), directory, root, root.parent, root.parent.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(directory: Path) -> None:
    """Remove everything except the journal: the job has ended, and its keys open nothing any more."""
    # The secrets first: a driver that is killed meanwhile must not leave them.
    remove_secrets(directory)
    for name in (FRAMES, UNFINISHED, f"{JOURNAL}.part"):
        (directory / name).unlink(missing_ok=True)
    for path in directory.glob(f"{FILES}.*"):
        path.unlink(missing_ok=True)


class TurnRecord:
    """Decides when turns are written to a job's record. For the loop's thread.

    `begin` begins the record of a new job.
    """

    def __init__(self, record: JobRecord, engine: "Engine", begin: Callable[[], None]) -> None:
        self._record = record
        self._engine = engine
        self._begin = begin
        self._waiting: list[Turn] = []

    @property
    def is_waiting(self) -> bool:
        """True if turns without actions are not written yet."""
        return bool(self._waiting)

    def keep(self, turns: "Sequence[Turn]") -> "Sequence[Turn]":
        """Write turns with actions, and waiting turns, and return the written turns.

        Turns without actions may wait a moment for others, until a call without turns.
        """
        self._waiting += turns
        # A write for each heartbeat would be a sync of the disk for each with --fsync.
        if not self._waiting or (
            turns and len(self._waiting) < _MOST_AT_ONCE and not any(turn.actions for turn in turns)
        ):
            return ()
        recorded, self._waiting = self._waiting, []
        decided = [turn for turn in recorded if turn.is_decided]
        if decided:
            if not self._record.has_begun:
                self._begin()
            self._record.write(decided, _hellos(decided))
            self._record.compact(self._engine)
        return recorded


def _hellos(turns: "Sequence[Turn]") -> dict[int, dict[str, Any]]:
    """Return the greetings of new agents by their links."""
    sources = [turn.arrival.source for turn in turns if isinstance(turn.arrival.event, HostReady)]
    return {source.number: _without_secrets(source.hello) for source in sources if source is not None}


def _without_secrets(hello: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a greeting for every reader of the journal."""
    rendezvous = hello["rendezvous"]
    return {
        **hello,
        **dict.fromkeys(_SECRETS),
        "rendezvous": None if rendezvous is None else {**rendezvous, "key": None},
    }


JOURNAL = "journal"
FORMAT = 5
_NAME = b"hvlaunch journal "
_MAGIC = _NAME + b"%d\n" % FORMAT
_MOST_IDLE = 4096
"""Idle turns at the end of a journal before a Lull replaces them."""
_IDLE_PER_WORKER = 16
"""The same for each worker, if more: a Lull's size grows with the workers."""
_HINT = "start the job again: its old workers end by themselves"
_BEFORE_ANYTHING = "journal {}: its driver was killed before the first event"

Row = Sequence[Any]


class NoJournal(HvlaunchError):
    """The job has no journal: the job was killed too early to be taken over, or its disk was full.

    Try: start the job again.
    """

    exit_code = EXIT_HOSTS


class ForeignJournal(HvlaunchError):
    """The job's journal is another program's, or another user can write it.

    Try: check the owner and the mode of the job's directory.
    """

    exit_code = EXIT_HOSTS


class OtherVersion(HvlaunchError):
    """Another version of hvlaunch began the job; another engine may decide otherwise, and can't take the job over.

    Try: the version that `hvlaunch jobs --json` shows.
    """

    exit_code = EXIT_HOSTS


class TornJournal(HvlaunchError):
    """A part of the job's journal is missing or damaged, by the disk or a power loss.

    Try: start the job again.
    """

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
        raise OtherVersion(cause, hint="the same version of hvlaunch that started the job")


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


class Takeover:
    """A takeover of a killed driver's job: its past turns, and the clocks of both drivers."""

    def __init__(self, past: Past, shift: float, *, is_same_boot: bool) -> None:
        self.past = past
        self.shift = shift
        """Seconds from the machine's monotonic clock to the new driver's clock."""
        self.is_same_boot = is_same_boot
        """True if the machine has not booted since: every write of the killed driver is then in its files."""
        self._now: float | None = None
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
            raise OtherVersion(cause, hint="the same version of hvlaunch that started the job")
