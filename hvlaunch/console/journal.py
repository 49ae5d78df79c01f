"""A file with an object for each event: --events."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from hvlaunch.errors import BadUsage

__all__ = ["Journal"]

_PATIENCE = 5.0


class Journal:
    """Appends JSON objects to a file, one on each line, each written at once.

    A thread of its own writes: a disk that hangs holds up nobody.
    """

    def __init__(self, path: Path, on_error: Callable[[str], None]) -> None:
        """`on_error` is told, once and in the journal's thread, that records are lost. Raises BadUsage."""
        self._path = path
        self._on_error = on_error
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BadUsage(
                f"--events {path}: {_reason(error)}", hint="a file that you may write to"
            ) from None
        self._thread = Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Never blocks."""
        self._queue.put(json.dumps(record).encode() + b"\n")

    def close(self, timeout: float = _PATIENCE) -> None:
        """Write what is left, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        failed = False
        while (line := self._queue.get()) is not None:
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:  # noqa: PERF203 - the next line may find room again
                if not failed:
                    failed = True
                    self._on_error(f"--events {self._path}: {_reason(error)}; some events are lost")
        os.close(self._descriptor)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()
