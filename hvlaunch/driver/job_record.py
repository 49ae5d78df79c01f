"""The record of a running job on disk, for a successor: journal, keys, frames, store of the rendezvous."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvlaunch import __version__
from hvlaunch.console.lines import Stream
from hvlaunch.console.notes import FileSizes, UnfinishedLines
from hvlaunch.driver.program.keys import Keys
from hvlaunch.engine.codec import BadData
from hvlaunch.engine.entries import begin_entry
from hvlaunch.engine.events import HostReady
from hvlaunch.job import JobSpec
from hvlaunch.outside.directory import ABOUT, KEYS, STORE, remove_secrets
from hvlaunch.record import PAGE, SharedFile
from hvlaunch.rendezvous.serving.store_record import StoreFile

if TYPE_CHECKING:
    from hvlaunch.driver.journal import Journal, Past
    from hvlaunch.driver.turn import Turn
    from hvlaunch.engine.engine import Engine

__all__ = [
    "FRAMES",
    "UNFINISHED",
    "FrameNumbers",
    "FrameRecord",
    "FrameRecords",
    "JobRecord",
    "TurnRecord",
    "forget",
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
        # Loaded here, while hosts connect already.
        from hvlaunch.driver.journal import JOURNAL, Journal  # noqa: PLC0415 (see above)

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
        from hvlaunch.driver.journal import JOURNAL, Journal  # noqa: PLC0415 (as in begin())

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
    from hvlaunch.driver.journal import JOURNAL  # noqa: PLC0415 (as in begin())

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
