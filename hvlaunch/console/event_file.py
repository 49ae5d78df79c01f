"""A file with one JSON object for each event (--events)."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from hvlaunch.errors import BadUsage
from hvlaunch.owners import open_not_planted

__all__ = ["EventFile", "records_of"]

_PATIENCE = 5.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
"""Without O_NONBLOCK, opening a named pipe without a reader would block for ever."""


class EventFile:
    """Appends JSON objects to a file, one per line, each written at once.

    A thread of its own writes the file: a hanging disk stops nothing else.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        """Open the file. `on_error` is called once, in the file's thread, when records are lost. Raises BadUsage."""
        self._path = path
        self._on_error = on_error
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        try:
            self._descriptor = open_not_planted(str(path), _FLAGS, 0o600)
            # Only opening had to be non-blocking; the file's own thread may wait for a slow pipe.
            os.set_blocking(self._descriptor, True)
        except OSError as error:
            cause, hint = _reason(error), "a file that you may write to"
            if error.errno == errno.ENXIO:
                cause, hint = "this pipe has no reader", "start its reader first, as in cat FILE &"
            elif error.errno == errno.ELOOP:
                cause = "it is a link that another user made, or can replace"
            elif error.errno == errno.EPERM and error.strerror:
                cause = error.strerror
            raise BadUsage(f"--events {path}: {cause}", hint=hint) from None
        self._thread = Thread(target=self._run, name="event file", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Never blocks."""
        self._queue.put(json.dumps(record).encode() + b"\n")

    def close(self, timeout: float = _PATIENCE) -> None:
        """Write the rest, for at most `timeout` seconds."""
        # None ends the thread after everything before it.
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (line := self._queue.get()) is not None:
            try:
                unwritten = memoryview(line)
                while unwritten:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
            except OSError as error:  # noqa: PERF203 - the next line may find room again
                if not failed:
                    failed = True
                    self._on_error(f"--events {self._path}: {_reason(error)}; some events are lost")
        os.close(self._descriptor)


def records_of(path: Path, job_id: str) -> int:
    """Count the records of the job in the file; 0 if `path` is not a regular file."""
    mark, count = f'"job": "{job_id}"'.encode(), 0
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                count = sum(mark in line and line.endswith(b"\n") for line in file)
    return count


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()
