"""The files of --output-filename: a directory for each round, and a file for each rank's output."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hvlaunch.console.files import JobFolder
from hvlaunch.console.printer import Printer
from hvlaunch.errors import BadUsage

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes

__all__ = ["RoundFiles", "make_output_directory"]


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
