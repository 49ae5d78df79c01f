"""The user's queue of jobs on disk: the list, and a directory for each submission.

Commands and the queue's server (queue_server.py) append events to one log, each under the lock of the log: a removed job
is not started. The server is needed for starts alone.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.errors import EXIT_NOT_WRITTEN, HvlaunchError
from hvlaunch.outside import jobs_directory
from hvlaunch.outside.schedule import Added, Event, Running, Schedule, event_of, words_of
from hvlaunch.outside.shared_log import LogContent, SharedLog
from hvlaunch.owners import write_whole

__all__ = [
    "ENVIRONMENT",
    "OPEN",
    "SPECS",
    "Queue",
    "QueueEntry",
    "QueueNotWritten",
    "queue_beside",
    "queue_directory",
]

SPECS, ENVIRONMENT = "jobs.json", "environment.json"
"""The jobs of a submission, and the environment of hvlaunch then. Both may have secrets, and have mode 600."""
OPEN = "open"
"""Directory of the locks of jobs from their starts to their ends, by their ids; prune() keeps the directories of such jobs."""
_PATIENCE = 20.0
_MOST = 1000
"""Number of records before the log is shortened."""


class QueueNotWritten(HvlaunchError):
    """The list of queued jobs can't be read or written, such as on a full disk. The list has not changed.

    Try: make room on the disk of `~/.local/state`.
    """

    exit_code = EXIT_NOT_WRITTEN


def queue_directory(environ: Mapping[str, str]) -> Path:
    """Return the queue's directory, beside that of the jobs. Raises NoJobDirectory."""
    return queue_beside(jobs_directory(environ))


def queue_beside(jobs: Path) -> Path:
    """Return the queue's directory by that of the jobs."""
    return jobs.with_name("queue")


class Queue:
    """The list. Its methods raise QueueNotWritten."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log = SharedLog(
            directory, b"hvlaunch queue 1\n", lock="log.lock", patience=_PATIENCE, is_synced=True
        )
        self._seen: tuple[int, ...] | None = None
        self._schedule = Schedule()

    def read(self) -> Schedule:
        """Return the current list; callers do not change the list."""
        try:
            status = self._log.path.stat()
        except OSError:
            seen: tuple[int, ...] = ()
        else:
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen != self._seen:
            self._schedule = self._replayed()[0]
            self._seen = seen
        return self._schedule

    def change(self, decide: Callable[[Schedule], Sequence[Event]]) -> Sequence[Event]:
        """Append the events of `decide`, a function of the current list, under the lock; return the events."""
        try:
            with self._log.locked():
                schedule, content = self._replayed()
                events = decide(schedule)
                for event in events:
                    schedule.apply(event)
                if not events:
                    pass
                elif len(content.bodies) >= _MOST and not content.damage:
                    # The list as it is now, in place of how it came about: ended jobs would be read for ever.
                    everything = Added(tuple(schedule.jobs.values()), schedule.next)
                    self._log.replace(content, [_body([everything])])
                else:
                    self._log.append(content, [_body(events)])
        except OSError as error:
            raise self._not_written(error) from None
        return events

    def _replayed(self) -> tuple[Schedule, LogContent]:
        try:
            content = self._log.read()
        except OSError as error:
            raise self._not_written(error) from None
        schedule = Schedule()
        for body in content.bodies:
            # Events of another version are left out.
            with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):
                for words in json.loads(body):
                    schedule.apply(event_of(words))
        return schedule, content

    def _not_written(self, error: OSError) -> QueueNotWritten:
        cause = (error.strerror or str(error)).lower()
        return QueueNotWritten(f"the queue can't be changed: {error.filename or self._log.path}: {cause}")


def _body(events: Sequence[Event]) -> bytes:
    return json.dumps([words_of(event) for event in events], separators=(",", ":")).encode()


class QueueEntry:
    """A job of the queue for its driver, and its files in the directory of its submission."""

    def __init__(self, queue: Queue, number: str, job: str) -> None:
        """`job` is the id of this start."""
        self.directory = queue.directory / number.partition("_")[0]
        self._queue = queue
        self._number = number
        self._job = job

    @property
    def log(self) -> Path:
        """The file for errors of the job's first driver."""
        return self._named("log")

    @property
    def is_withdrawn(self) -> bool:
        """True if the job must not get its GPUs. Raises QueueNotWritten."""
        return not self._may_begin(self._queue.read())

    def begin(self, units: Mapping[str, int]) -> bool:
        """Record the begin of the workers; return False, without a record, for a withdrawn job. Raises QueueNotWritten."""
        # In the list itself: a job that was removed in time does not start, and no job starts twice.
        may_begin = False

        def running(schedule: Schedule) -> list[Event]:
            nonlocal may_begin
            may_begin = self._may_begin(schedule)
            is_new = may_begin and schedule.jobs[self._number].state == "starting"
            return [Running(self._number, time.time(), dict(units))] if is_new else []

        self._queue.change(running)
        return may_begin

    def _may_begin(self, schedule: Schedule) -> bool:
        job = schedule.jobs.get(self._number)
        if job is None or job.job != self._job:
            return False
        # A successor comes when the job runs already.
        return job.state == "running" or (job.state == "starting" and not job.is_withdrawn)

    def note_wait(self, free: Mapping[str, int], total: int, text: str) -> None:
        """Note the cause of waiting, and the free GPUs by host, of `total`."""
        self._write("waits", {"free": dict(free), "total": total, "text": text})

    def note_failure(self, code: int, text: str) -> None:
        """Note an error before the job had a directory."""
        self._write("failed", {"code": code, "text": text})

    @property
    def wait(self) -> Mapping[str, Any] | None:
        return self._read("waits")

    @property
    def failure(self) -> Mapping[str, Any] | None:
        return self._read("failed")

    def clear(self) -> None:
        """Remove the notes, for another start."""
        for name in ("waits", "failed"):
            with suppress(OSError):
                self._named(name).unlink(missing_ok=True)

    def _named(self, name: str) -> Path:
        return self.directory / f"{self._number}.{name}"

    def _write(self, name: str, words: Mapping[str, Any]) -> None:
        # On a full disk others know less.
        with suppress(OSError):
            write_whole(self._named(name), json.dumps(words).encode(), 0o600)

    def _read(self, name: str) -> Mapping[str, Any] | None:
        try:
            words = json.loads(self._named(name).read_bytes())
        except (OSError, ValueError):
            return None
        return words if isinstance(words, dict) else None
