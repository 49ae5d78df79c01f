"""An append-only log with several writers of the same user: the ledger of hosts, and the queue of jobs.

Damage to the file costs the damaged part. On a full disk a write fails, and the file stays as it was.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import NoJobDirectory, check_root, take_lock
from hvlaunch.owners import make_own_directory
from hvlaunch.record import BadLog, Log, Mark, read_records

__all__ = ["LogContent", "SharedLog"]

_MOST_BYTES = 1 << 26
"""Limit of reading: logs are shortened long before."""


class LogContent(NamedTuple):
    """The readable part of a log."""

    bodies: list[bytes]
    end: Mark
    """Behind the last readable record; 0 without a file."""
    damage: str = ""
    """Words for the damage behind."""


class SharedLog:
    """The file `log` of a directory. `magic` is its beginning; `lock` is the name of the lock for writers."""

    def __init__(
        self, directory: Path, magic: bytes, *, lock: str, patience: float, is_synced: bool = False
    ) -> None:
        """`patience` is the limit in seconds for another writer; with `is_synced`, records outlive a loss of power."""
        self.path = directory / "log"
        self.start = Mark(len(magic))
        self._directory = directory
        self._magic = magic
        self._lock = lock
        self._patience = patience
        self._is_synced = is_synced

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers away; make a missing directory. Raises OSError."""
        make_own_directory(str(self._directory))
        try:
            check_root(self._directory)
        except NoJobDirectory as error:
            raise OSError(0, error.cause) from None
        lock = take_lock(self._directory / self._lock, os.O_CREAT, self._patience)
        try:
            yield
        finally:
            os.close(lock)

    def read(self) -> LogContent:
        """Return the readable records. Raises OSError."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return LogContent([], Mark(0))
        # A process killed in the first moment leaves a file without its first bytes.
        if self._magic.startswith(data):
            return LogContent([], Mark(len(data) if data == self._magic else 0))
        bodies: list[bytes] = []
        end = self.start
        if not data.startswith(self._magic):
            return LogContent(bodies, end, "its beginning is another program's")
        try:
            for body, mark in read_records(memoryview(data), self.start):
                bodies.append(bytes(body))
                end = mark
        except BadLog as error:
            return LogContent(bodies, end, str(error))
        return LogContent(bodies, end)

    def append(self, old: LogContent, bodies: Sequence[bytes]) -> None:
        """Append behind `old`, read under the same lock. Raises OSError."""
        if old.damage:
            # The readable part moves to a new file; the damaged file stays for inspection.
            self.path.replace(self.path.with_name("log.damaged"))
            bodies = [*old.bodies, *bodies]
        elif not old.end.size:
            self.path.unlink(missing_ok=True)
        with closing(self._open(old)) as log:
            for body in bodies:
                log.append([body])

    def replace(self, old: LogContent, bodies: Sequence[bytes]) -> None:
        """Replace the records at once, under the lock. Raises OSError."""
        with closing(self._open(old)) as log:
            log.replace(self.start, [[body] for body in bodies])

    def _open(self, old: LogContent) -> Log:
        if old.damage or not old.end.size:
            return Log.create(self.path, self._magic, is_synced=self._is_synced)
        return Log.resume(self.path, old.end, is_synced=self._is_synced)
