"""The program of a successor, which takes over the job of a killed driver: `python -m hvlaunch.gloo.successor DIRECTORY`.

A successor is headless: the job's directory keeps the workers' output. Its exit code is the job's, 2 if the job has
another driver, and 69 if the job can't be taken over; stderr has the reason then.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from hvlaunch.console.output_store import OutputStore
from hvlaunch.driver.job_record import JOURNAL, NoJournal, Past, TornJournal, read_past
from hvlaunch.driver.program import Keys
from hvlaunch.errors import EXIT_HOSTS, HvlaunchError
from hvlaunch.gloo.controller import take_over
from hvlaunch.job import JobResult
from hvlaunch.outside import KEYS, RESULT, DriverLives, JobDirectory, remove_secrets

__all__ = ["main", "succeed"]


class JobOver(HvlaunchError):
    """The job ended before it could be taken over.

    Try: `hvlaunch logs JOB` prints its output.
    """

    exit_code = EXIT_HOSTS


def succeed(path: Path) -> JobResult:
    """Take over the job of this directory, and run it to its end.

    Raises DriverLives, NoJobDirectory, JobOver, and the errors of read_past().
    """
    with closing(JobDirectory.adopt(path)) as directory:
        try:
            past, keys = _past_and_keys(path)
        except HvlaunchError as error:
            _say_in_output(path, str(error))
            # A journal of another version may still be taken over by that version.
            if isinstance(error, JobOver | NoJournal | TornJournal):
                with suppress(OSError):
                    remove_secrets(path)
            raise
        # Relative paths of the job count from there; a directory that is gone is no reason to end the job.
        with suppress(OSError):
            os.chdir(past.begin.cwd)
        return take_over(directory, keys, past)


def _past_and_keys(path: Path) -> tuple[Past, Keys]:
    if (path / RESULT).exists():
        raise JobOver(f"{path}: the job has ended", hint="hvlaunch jobs")
    # The journal first: its errors say more than missing keys.
    past = read_past(path / JOURNAL)
    try:
        keys, env = Keys.load(path / KEYS)
    except FileNotFoundError:
        cause = (
            f"{path}: the job's keys were removed: it had no driver for longer than its hosts wait for one"
        )
        raise NoJournal(cause, hint="start the job again") from None
    except (OSError, ValueError) as error:
        raise NoJournal(f"{path / KEYS}: {error}") from None
    begin = past.begin._replace(spec=replace(past.begin.spec, env=env))
    return past._replace(begin=begin), keys


def _say_in_output(path: Path, text: str) -> None:
    """Say it where the job's output is read: a successor's own stderr has no reader, since a minder starts it."""
    with suppress(OSError), closing(OutputStore(path)) as store:
        store.say(text)
        store.write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return succeed(Path(words[0])).exit_code
    except HvlaunchError as error:
        sys.stderr.write(f"hvlaunch: {error}\n")
        return error.exit_code if isinstance(error, DriverLives) else EXIT_HOSTS


if __name__ == "__main__":
    sys.exit(main())
