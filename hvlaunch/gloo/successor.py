"""A driver that takes over the job of another that was killed: `python -m hvlaunch.gloo.successor DIRECTORY`.

It is headless: what workers print is kept in the job's directory. Its exit code is the job's, 2 where there is another
driver, and 69 where the job can't be taken over; then stderr says why.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from hvlaunch.console.output_store import OutputStore
from hvlaunch.driver.program.keys import KEYS, Keys
from hvlaunch.driver.record.journal import JOURNAL, NoJournal, Past, read_past
from hvlaunch.errors import EXIT_HOSTS, HvlaunchError
from hvlaunch.gloo.controller import take_over
from hvlaunch.job import JobResult
from hvlaunch.outside.directory import RESULT, DriverLives, JobDirectory

__all__ = ["main", "succeed"]


class JobOver(HvlaunchError):
    """There is nothing to be taken over: the job has ended."""

    exit_code = EXIT_HOSTS


def succeed(path: Path) -> JobResult:
    """Take over the job of this directory, and run it to its end.

    Raises DriverLives, NoJobDirectory, JobOver, and what read_past() raises.
    """
    with closing(JobDirectory.adopt(path)) as directory:
        try:
            past, keys = _what_was(path)
        except HvlaunchError as error:
            _tell_who_looks(path, str(error))
            raise
        with suppress(OSError):
            os.chdir(past.begin.cwd)
        return take_over(directory, keys, past)


def _what_was(path: Path) -> tuple[Past, Keys]:
    if (path / RESULT).exists():
        raise JobOver(f"{path}: the job has ended", hint="hvlaunch jobs")
    past = read_past(path / JOURNAL)
    try:
        return past, Keys.load(path / KEYS)
    except (OSError, ValueError) as error:
        raise NoJournal(f"{path / KEYS}: {error}") from None


def _tell_who_looks(path: Path, text: str) -> None:
    """Nobody may read our stderr: a minder has started us."""
    with suppress(OSError), closing(OutputStore(path)) as store:
        store.say(text)
        store.write()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return succeed(Path(words[0])).exit_code
    except HvlaunchError as error:
        sys.stderr.write(f"hvlaunch: {error}\n")
        return error.exit_code if isinstance(error, DriverLives) else EXIT_HOSTS


if __name__ == "__main__":
    sys.exit(main())
