"""The journal of a job: all that its engine was fed, in a file for the user alone; engine/entries.py says of what."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hvlaunch import __version__
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import BadData
from hvlaunch.engine.entries import Entry, begin_entry, turn_entry
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec

__all__ = ["Journal", "entries"]

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC


class Journal:
    """Writes each entry at once, on a line of its own: what has been carried out is in it.

    The job's environment is in it too, but none of its keys. `say` is told, once, where no more can be written: it
    ends there, since one with a gap would tell of another job.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        """Raises BadUsage where there is such a file, or none can be made."""
        self._path = path
        self._say = say
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise BadUsage(f"journal {path}: {_reason(error)}") from None
        self._is_whole = True

    def begin(self, spec: JobSpec, job_id: str, rendezvous_port: int) -> None:
        """The first entry."""
        self._write(lambda: begin_entry(__version__, job_id, spec, rendezvous_port))

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """An event at `now`, and what the engine made of it, before any of that is carried out."""
        self._write(lambda: turn_entry(event, actions, now))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, entry: Callable[[], Entry]) -> None:
        if not self._is_whole:
            return
        try:
            line = json.dumps(entry(), separators=(",", ":"), allow_nan=False)
            rest = memoryview(line.encode() + b"\n")
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except (OSError, BadData) as error:
            self._is_whole = False
            self._say(f"journal {self._path}: {_reason(error)}; it ends here")


def _reason(error: OSError | BadData) -> str:
    return str(error) if isinstance(error, BadData) else os.strerror(error.errno or 0).lower()


def entries(path: Path) -> Iterator[Entry]:
    """What is in a journal; half a line, from a driver that was killed over it, is no entry."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
