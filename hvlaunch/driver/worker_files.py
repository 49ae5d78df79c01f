"""Files of the workers: the output of each rank (--output-filename), and the results of a function call."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO

from hvlaunch.console.files import JobFolder
from hvlaunch.console.printer import Printer
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes

__all__ = ["PROBLEM", "ResultFiles", "RoundFiles", "make_output_directory", "parts_of"]


class RoundFiles:
    """Keeps the printer writing to the files of the newest round. For the loop's thread.

    `sizes` returns the recorded sizes of a round's files, by its number, its size, and whether the record is complete.
    """

    def __init__(
        self,
        directory: Path,
        job_id: str,
        printer: Printer,
        sizes: "Callable[[int, int, bool], FileSizes | None]",
        *,
        is_elastic: bool,
    ) -> None:
        self._directory = directory
        self._job_id = job_id
        self._printer = printer
        self._sizes = sizes
        self._is_elastic = is_elastic
        self._folder: JobFolder | None = None
        self._round: int | None = None
        self._size = 0
        self.is_successor = False
        """True if a killed driver has made the directory already."""
        self.path: Path | None = None
        """The directory of the newest round's files."""

    def begin_round(self, number: int, size: int, *, is_replay: bool) -> None:
        """Write output to the files of this round from here on. A replay only notes the round.

        Raises BadUsage if the files of the first round can't be made: the job has not started yet. Later failures
        are reported, and the job continues without files.
        """
        self._size = size
        if self._round == number:
            return
        is_first, self._round = self._round is None, number
        # The killed driver has made these files; reopen() continues the newest of them.
        if is_replay:
            return
        try:
            self._open(number)
        except BadUsage as error:
            if is_first:
                raise
            self._printer.say(str(error))

    def reopen(self, *, is_known: bool) -> None:
        """Append to the files of a killed driver's last round. `is_known`: the record of their sizes is complete."""
        if self._round is not None:
            try:
                self._open(self._round, is_continued=True, is_known=is_known)
            except BadUsage as error:
                self._printer.say(str(error))

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _open(self, number: int, *, is_continued: bool = False, is_known: bool = False) -> None:
        # The folder is made with the first round: a job that fails before leaves no empty one.
        if self._folder is None:
            self._folder = JobFolder(self._directory, self._job_id, goes_on=self.is_successor)
        below = f"round.{number}" if self._is_elastic else ""
        sizes = self._sizes(number, self._size, is_known)
        self._printer.keep(self._folder.files(self._size, below, sizes=sizes, goes_on=is_continued))
        self.path = self._folder.path / below


def make_output_directory(path: Path) -> None:
    """Make the directory of --output-filename, which must belong to the user. Raises BadUsage."""
    from hvlaunch.owners import make_own_directory  # noqa: PLC0415 (few jobs have one)

    try:
        make_own_directory(str(path))
    except OSError as error:
        cause = error.strerror if error.errno == errno.EPERM else os.strerror(error.errno or 0).lower()
        part = "" if error.filename in (None, str(path)) else f"{error.filename}: "
        hint = (
            "a directory of your own" if error.errno == errno.EPERM else "a directory that you may write to"
        )
        raise BadUsage(f"--output-filename {path}: {part}{cause}", hint=hint) from None


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
