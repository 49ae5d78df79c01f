"""A developer's journal of a job: every event and its actions, in a file for this user alone (HVLAUNCH_JOURNAL).

engine/codec.py describes the entries; replay() plays a journal again.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvlaunch import __version__
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import BadData, Entry, begin_entry, turn_entry
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec

__all__ = ["ReplayJournal", "entries"]

# O_EXCL: an older journal is not overwritten, and a link in the file's place is not followed.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class ReplayJournal:
    """Writes each entry at once, on a line of its own, before the loop carries the turn out. A watcher.

    The file has the job's environment, and none of its keys. `say` is called once if writing fails: the journal ends
    there, since a journal with a gap would describe another job.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Create the file. Raises BadUsage if it exists, or can't be made."""
        self._path = path
        self._say = say
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise BadUsage(f"journal {path}: {_reason(error)}") from None
        self._is_whole = True

    def begin(self, spec: JobSpec, job_id: str, rendezvous_port: int) -> None:
        """Write the first entry."""
        # The entry is made within _write(), where an event that can't be encoded ends the journal.
        self._write(lambda: begin_entry(__version__, job_id, spec, rendezvous_port))

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Write an event at `now` and its actions."""
        self._write(lambda: turn_entry(event, actions, now))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, entry: Callable[[], Entry]) -> None:
        if not self._is_whole:
            return
        try:
            line = json.dumps(entry(), separators=(",", ":"), allow_nan=False)
            remaining = memoryview(line.encode() + b"\n")
            # A write to a pipe or a nearly full disk may be partial.
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]
        except (OSError, BadData) as error:
            self._is_whole = False
            self._say(f"journal {self._path}: {_reason(error)}; it ends here")


def _reason(error: OSError | BadData) -> str:
    return str(error) if isinstance(error, BadData) else os.strerror(error.errno or 0).lower()


def entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a journal. An incomplete last line, of a driver killed while writing, is skipped."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
