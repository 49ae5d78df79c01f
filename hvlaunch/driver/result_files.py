"""The results of a function call on workers: a file for each worker, written in parts as they arrive."""

import os
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

__all__ = ["PROBLEM", "ResultFiles", "parts_of"]

PROBLEM = ".problem"
"""Suffix of the file with the reason for a missing result of a rank."""

_PART = 1 << 20
"""Bytes of a frame."""
_Worker = tuple[int, int, int]
"""A worker, by number of its link, slot and start."""


class ResultFiles:
    """Writes result files. A complete file is named by its worker's rank at that time. For links' threads.

    The driver does not read results: only the caller of the function does.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = Lock()
        """Guards the table of open files; each file is written by a single thread."""
        self._open: dict[_Worker, tuple[int, BinaryIO]] = {}
        self._failed: set[_Worker] = set()

    def write_part(self, worker: _Worker, rank: int, part: bytes) -> None:
        """Write the next part of the worker's result; an empty part ends the result."""
        if worker in self._failed:
            return
        try:
            if part:
                self._file(worker, rank).write(part)
            else:
                self._finish(worker)
        except OSError as error:
            self._give_up(worker, rank, os.strerror(error.errno or 0).lower())

    def close(self) -> None:
        """Finish the open files: no more parts will come."""
        with self._lock:
            workers = list(self._open)
        for worker in workers:
            with suppress(OSError):
                self._finish(worker)

    def _file(self, worker: _Worker, rank: int) -> BinaryIO:
        with self._lock:
            if worker in self._open:
                _, file = self._open[worker]
            else:
                file = open(self._path(worker), "xb", buffering=0, opener=_private)  # noqa: SIM115 (until it ends)
            self._open[worker] = rank, file
            return file

    def _finish(self, worker: _Worker) -> None:
        with self._lock:
            rank, file = self._open.pop(worker, (0, None))
        if file is not None:
            file.close()
            # A reader that polls for the name sees the whole result or no file.
            self._path(worker).replace(self._directory / str(rank))

    def _give_up(self, worker: _Worker, rank: int, cause: str) -> None:
        # Further parts are dropped: a result with a gap is none.
        self._failed.add(worker)
        with self._lock:
            _, file = self._open.pop(worker, (0, None))
        with suppress(OSError):
            if file is not None:
                file.close()
            self._path(worker).unlink(missing_ok=True)
            (self._directory / f"{rank}{PROBLEM}").write_text(cause)

    def _path(self, worker: _Worker) -> Path:
        return self._directory / ("part." + ".".join(map(str, worker)))


def parts_of(program: Path) -> list[bytes]:
    """Return the program in parts of a frame each. Raises OSError."""
    data = program.read_bytes()
    return [data[start : start + _PART] for start in range(0, len(data), _PART)]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
