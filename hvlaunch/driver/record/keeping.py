"""What is kept of a job while it runs, so that another driver can take it over: its journal, its keys, and what was seen."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch import __version__
from hvlaunch.console.notes import UnfinishedLines
from hvlaunch.driver.program.keys import KEYS, Keys
from hvlaunch.driver.record.seen import SEEN, SeenFile, SeenFrames
from hvlaunch.engine.codec import BadData
from hvlaunch.engine.entries import begin_entry
from hvlaunch.job import JobSpec
from hvlaunch.outside.directory import ABOUT
from hvlaunch.rendezvous.serving.store_record import StoreFile

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes
    from hvlaunch.driver.record.journal import Journal, Past
    from hvlaunch.driver.turn import Turn
    from hvlaunch.engine.engine import Engine

__all__ = ["UNFINISHED", "Keeping", "forget"]

STORE = "store"
FILES = "files"
UNFINISHED = "unfinished"


class Keeping:
    """Four files in the job's directory. `say` is told, once, where the job can't be taken over after all."""

    def __init__(
        self,
        directory: Path,
        say: Callable[[str], None],
        *,
        is_synced: bool = False,
        past: "Past | None" = None,
    ) -> None:
        """Of a new job, or of one of which this is the past. Raises OSError, BadStoreFile."""
        self._directory = directory
        self._say: Callable[[str], None] | None = say
        self.is_whole = True
        """Whether another driver could take the job over."""
        self._is_synced = is_synced
        self._seen = SeenFile(directory / SEEN, is_synced=is_synced)
        self.unfinished = UnfinishedLines(directory / UNFINISHED)
        """How lines begin that were taken from agents and not shown."""
        begin = StoreFile.create if past is None else StoreFile.open
        self.store_file = begin(directory / STORE, sync=is_synced)
        """What the rendezvous holds."""
        self.store_file.lost = self.lose
        self._journal: Journal | None = None

    def seen(self, link: int) -> SeenFrames:
        """What is on record of the frames of this link."""
        return self._seen.of(link)

    def sizes(self, number: int, ranks: int, *, is_known: bool) -> "FileSizes | None":
        """Where it is on record how large the files of this round's ranks are, or is to be; None where that can't be."""
        from hvlaunch.console.notes import FileSizes  # noqa: PLC0415 (few jobs have files)

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
        """Whether there is a journal, or can be none."""
        return self._journal is not None or not self.is_whole

    def begin(self, spec: JobSpec, keys: Keys, port: int) -> None:
        """Begin the record of a new job: its keys and its journal."""
        try:
            from hvlaunch.driver.record.journal import JOURNAL, Journal  # noqa: PLC0415 (not for a local job)

            keys.save(self._directory / KEYS)
            if self._is_synced:
                _sync(self._directory, ABOUT, KEYS)
            self._journal = Journal(self._directory / JOURNAL, self.lose, is_synced=self._is_synced)
            self._journal.begin(begin_entry(__version__, keys.job_id, spec, port, str(Path.cwd())))
        except (OSError, BadData) as error:
            self.lose(f"{self._directory}: {error}")

    def go_on(self, past: "Past", epoch: int, shift: float) -> None:
        """As begin(), for another driver: it writes on behind what was. Raises OSError."""
        from hvlaunch.driver.record.journal import JOURNAL, Journal  # noqa: PLC0415 (as in begin())

        path = self._directory / JOURNAL
        self._journal = Journal(path, self.lose, is_synced=self._is_synced, end=past.end)
        self._journal.take_over(epoch, shift)

    def write(self, turns: "Sequence[Turn]", hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Further turns. When it returns they need no driver's memory any more."""
        if self._journal is not None:
            self._journal.write(turns, hellos)
            if not self.is_whole:
                self._journal.give_up("the rest is not whole")

    def lose(self, cause: str) -> None:
        """No other driver can take the job over any more: say so, once. For any thread."""
        self.is_whole = False
        say, self._say = self._say, None
        if say is not None:
            say(f"warning: {cause}: the job goes on, and ends if hvlaunch is killed")

    def fold(self, engine: "Engine") -> None:
        """All turns of the engine are written; let one take the place of those in which nothing has happened, if they are many."""
        if self._journal is not None and self._journal.should_compact(engine.workers.size):
            self._journal.compact(engine.lull())

    def close(self) -> None:
        """The job has ended. What is kept stays until it is on record how: see forget()."""
        self._seen.close()
        if self._journal is not None:
            self._journal.close()


def _sync(directory: Path, *names: str) -> None:
    """Return when the disk has these files, and the directory in its place. Raises OSError."""
    root = directory.parent
    for path in (*(directory / name for name in names), directory, root, root.parent, root.parent.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget(directory: Path) -> None:
    """Nobody shall take over a job that has ended, of which the keys open nothing any more."""
    for name in (KEYS, SEEN, STORE, UNFINISHED):
        (directory / name).unlink(missing_ok=True)
    for path in directory.glob(f"{FILES}.*"):
        path.unlink(missing_ok=True)
