"""The server of a user's queue: a process for the starts of queued jobs. It ends with the last open job.

A server after a kill or a boot finds the jobs again by the list, their locks and their directories. A process beside the server
starts another server after a kill. Each `hvlaunch queue` command does the same.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hvlaunch.errors import EXIT_HOSTS, EXIT_TOO_FEW, HvlaunchError
from hvlaunch.outside import (
    LOCK,
    MINDER,
    REPORT,
    SUCCESSOR_LOG,
    KnownJob,
    has_driver,
    has_minder,
    is_locked,
    known_job,
    remove,
    result_of,
    start_minder,
    start_process,
    take_lock,
)
from hvlaunch.outside.control import ControlClient
from hvlaunch.outside.queue import (
    ACTIVE,
    ENVIRONMENT,
    OPEN,
    SPECS,
    Action,
    Event,
    Finished,
    Queue,
    QueuedJob,
    QueueEntry,
    QueueNotWritten,
    Returned,
    Schedule,
    Starting,
    StartJob,
    StopJob,
    WithdrawJob,
    Withdrawn,
)

__all__ = ["QueueServer", "ensure_server", "machine_elsewhere", "run_keeper", "run_server"]

_LOOK = 0.2
_AGAIN = 30.0
"""Seconds before the second start of a job whose hosts can't be reached; doubled each time."""
_LONGEST = 600.0
_FILL_AGAIN = 60.0
"""Seconds before the next backfill with the same job, after a try without GPUs."""
_START_EVERY = 5.0
_STOP_EVERY = 10.0
_KILL_AFTER = 60.0
_STILL = 1.0
"""Seconds between two decisions without events."""
_RESTART = 1.0
_MACHINE = "machine"
_MAKING = 3600.0
"""Seconds after which an incomplete submission is abandoned."""


def ensure_server(directory: Path) -> None:
    """Start the queue's server for open jobs, unless it runs. Raises QueueNotWritten."""
    is_here = machine_elsewhere(directory) is None
    if is_here and not has_driver(directory) and _is_open(Queue(directory)):
        try:
            # A server killed in its first moments has started no keeper yet: the keeper starts the server.
            if has_minder(directory):
                start_process("hvlaunch.outside.queue_server", "run_server", directory)
            else:
                _start_keeper(directory)
        except BlockingIOError:
            # Another command is starting the keeper at this moment.
            return
        except OSError as error:
            raise QueueNotWritten(f"the queue's server can't be started: {error.strerror}") from None


def machine_elsewhere(directory: Path) -> str | None:
    """Return the name of another machine with the server, for a home directory of several machines."""
    # Locks of the other machine's processes may be invisible here, and a second server would start its jobs again.
    try:
        machine = (directory / _MACHINE).read_text()
    except OSError:
        return None
    return machine if machine and machine != os.uname().nodename else None


def _is_open(queue: Queue) -> bool:
    return any(job.state != "ended" for job in queue.read().jobs.values())


class QueueServer:
    """Carries out the actions of the schedule."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._queue = Queue(directory)
        self._jobs = directory.with_name("jobs")
        self._children: list[subprocess.Popen[bytes]] = []
        self._started: dict[str, float] = {}
        """When the processes of jobs were started, by the jobs' ids; by this server."""
        self._stopped: dict[str, tuple[bool, float]] = {}
        """Whether jobs have been asked to stop, and when they are asked again."""
        self._minded: set[str] = set()
        """Ids of jobs with a minder started by this server."""
        self._decided_at = 0.0
        self._decided_for: Schedule | None = None

    def run(self) -> None:
        """Serve until no job is open."""
        (self._directory / OPEN).mkdir(mode=0o700, exist_ok=True)
        machine = self._directory / _MACHINE
        machine.write_text(os.uname().nodename)
        for path in self._directory.glob(".*"):
            # Left by a killed `queue add`.
            if path.lstat().st_mtime < time.time() - _MAKING:
                shutil.rmtree(path, ignore_errors=True)
        while _is_open(self._queue):
            # The disk may be full for a while: what was not written is found again.
            with suppress(QueueNotWritten):
                self.turn(time.time())
            if not has_minder(self._directory):
                with suppress(OSError):
                    _start_keeper(self._directory)
            time.sleep(_LOOK)
        self._sweep()
        machine.unlink(missing_ok=True)

    def turn(self, now: float) -> None:
        """Look at the jobs, and start jobs."""
        self._children = [child for child in self._children if child.poll() is None]
        schedule = self._queue.read()
        for job in [job for job in schedule.jobs.values() if job.state in ACTIVE]:
            event = self._look(job, now)
            # Seen before: the driver may have begun, and ended, since the list was read.
            if event is not None and self._queue.change(partial(_if_unchanged, job, event)):
                self._clean(job)
        schedule = self._queue.read()
        if schedule is self._decided_for and now < self._decided_at + _STILL:
            return
        self._sweep()
        free = self._free(schedule)
        if actions := schedule.decide(now, free):
            # Decided again under the lock: a command may have changed the list in between.
            events = self._queue.change(
                lambda current: [
                    event
                    for action in current.decide(now, free)
                    if (event := _event_of(action, now)) is not None
                ]
            )
            for event in events:
                if isinstance(event, Starting):
                    self._start(self._queue.read().jobs[event.id], now)
            for action in actions:
                if isinstance(action, StopJob):
                    self._stop(schedule.jobs[action.id], now)
        self._decided_at, self._decided_for = now, self._queue.read()

    def _free(self, schedule: Schedule) -> dict[str, int]:
        """Return free GPUs by host, as seen by waiting jobs."""
        free: dict[str, int] = {}
        for job in schedule.jobs.values():
            if job.state == "starting" and (wait := self._entry(job).wait) is not None:
                free.update(wait["free"])
        return free

    def _entry(self, job: QueuedJob) -> QueueEntry:
        return QueueEntry(self._queue, job.id, job.job)

    def _lock(self, job: QueuedJob) -> Path:
        return self._directory / OPEN / job.job

    def _start(self, job: QueuedJob, now: float) -> None:
        """Start the job's process with its lock, unless another process has the lock."""
        if now < self._started.get(job.job, 0.0) + _START_EVERY:
            return
        self._started[job.job] = now
        entry = self._entry(job)
        try:
            lock = take_lock(self._lock(job), os.O_CREAT)
        except OSError:
            return
        try:
            words = json.loads((entry.directory / ENVIRONMENT).read_bytes())
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            log = os.open(entry.log, flags, 0o600)
            try:
                child = start_process(
                    "hvlaunch.gloo.queued",
                    "run_queued",
                    self._directory,
                    log,
                    [lock],
                    arguments=[job.id, job.job, "fill" if job.is_backfill else "wait", str(lock)],
                    environ=words["environ"],
                )
            finally:
                os.close(log)
            self._children.append(child)
        except (OSError, ValueError, LookupError, TypeError) as error:
            if not isinstance(error, OSError) or error.errno == errno.ENOENT:
                entry.note_failure(1, f"its directory {entry.directory} is damaged: {error}")
        finally:
            os.close(lock)

    def _look(self, job: QueuedJob, now: float) -> Event | None:
        """Return the event for the end or failed start of a job, or None."""
        # The lock first: a process that has ended leaves everything as it will be.
        is_alive = is_locked(self._lock(job))
        directory = self._jobs / job.job
        run = known_job(directory)
        if run is not None and run.result is not None:
            return None if is_alive else self._end_of(job, run.result, directory, now)
        if is_alive or (run is not None and (run.has_driver or has_minder(directory))):
            return None
        if run is not None and (result := result_of(run)) is not None:
            return self._end_of(job, result, directory, now)
        if job.state == "running":
            return self._without_driver(job, run, now)
        if run is not None:
            return self._dead_start(job, run, now)
        if (failure := self._entry(job).failure) is not None:
            return _failed(job, failure, now)
        if job.is_withdrawn or job.is_removed:
            return Returned(job.id, now, "", 0.0)
        self._start(job, now)
        return None

    def _end_of(self, job: QueuedJob, result: Mapping[str, Any], directory: Path, now: float) -> Event:
        """Return the event for a job with this result."""
        # A batch job notes its script's end: the result is that of a process on this machine.
        failure = self._entry(job).failure or {
            "code": int(result.get("exit_code") or 0),
            "text": _cause(result, directory),
        }
        if job.state == "starting":
            return _failed(job, failure, now)
        code = int(failure["code"])
        is_late = job.time_limit is not None and now >= job.since + job.time_limit and code
        reason = "removed" if job.is_removed else "time limit" if is_late else failure["text"]
        return Finished(job.id, now, code, reason)

    def _without_driver(self, job: QueuedJob, run: KnownJob | None, now: float) -> Event | None:
        """Let another driver take over a job whose driver and minder were killed."""
        if run is None:
            return Finished(job.id, now, None, "its directory was removed")
        # Before this server's own minder, the words are about an earlier driver.
        if job.job in self._minded:
            with suppress(OSError):
                words = (run.directory / SUCCESSOR_LOG).read_text(errors="replace").strip()
                if words:
                    cause = words.splitlines()[-1].removeprefix("hvlaunch: ")
                    return Finished(job.id, now, EXIT_HOSTS, f"its driver was killed: {cause}")
        self._minded.add(job.job)
        with suppress(OSError):
            start_minder(run.directory)
        return None

    def _dead_start(self, job: QueuedJob, run: KnownJob, now: float) -> Event | None:
        """Remove the directory of a driver killed before any worker; the job starts anew."""
        try:
            # A user may have it taken over at this moment.
            os.close(take_lock(run.directory / LOCK))
            remove(run.directory)
        except OSError:
            return None
        return Returned(job.id, now, "its driver was killed before it had GPUs", 0.0)

    def _clean(self, job: QueuedJob) -> None:
        """Remove the files of a start."""
        entry = self._entry(job)
        entry.clear()
        schedule = self._queue.read()
        after = schedule.jobs.get(job.id)
        is_over = after is None or after.state == "ended"
        if not is_over and (run := known_job(self._jobs / job.job)) is not None:
            with suppress(OSError):
                remove(run.directory)
        with suppress(OSError):
            self._lock(job).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove the directories of submissions without an open job: they have secrets."""
        schedule = self._queue.read()
        for path in self._directory.iterdir():
            # A higher number is that of a submission not yet in the list.
            is_listed = path.name.isdigit() and int(path.name) < schedule.next
            if is_listed and all(job.state == "ended" for job in schedule.named(path.name)):
                with suppress(OSError):
                    remove(path)

    def _stop(self, job: QueuedJob, now: float) -> None:
        run = known_job(self._jobs / job.job)
        is_asked, again = self._stopped.get(job.job, (False, 0.0))
        if run is None or not run.has_driver or now < again:
            return
        again = now + _STOP_EVERY
        with suppress(HvlaunchError):
            # A second request is a kill, as a second Ctrl-C is: not within the job's time of grace.
            ControlClient(run, 2.0).post("/stop", {"kill": is_asked})
            is_asked, again = True, again + self._grace(job)
        self._stopped[job.job] = is_asked, again

    def _grace(self, job: QueuedJob) -> float:
        try:
            specs = json.loads((self._entry(job).directory / SPECS).read_bytes())
            return float(specs[job.id]["grace"])
        except (OSError, ValueError, LookupError, TypeError):
            return _KILL_AFTER


def _if_unchanged(job: QueuedJob, event: Event, schedule: Schedule) -> list[Event]:
    now = schedule.jobs.get(job.id)
    return [event] if now is not None and (now.state, now.job) == (job.state, job.job) else []


def _event_of(action: Action, now: float) -> Event | None:
    match action:
        case StartJob(name, is_backfill):
            return Starting(name, os.urandom(6).hex(), now, is_backfill)
        case WithdrawJob(name):
            return Withdrawn(name)
    return None


def _cause(result: Mapping[str, Any], directory: Path) -> str:
    """Return the cause of a failure in a few words, with its host."""
    if result.get("rank") is not None:
        return f"rank {result['rank']} on {result.get('host')}"
    cause = str(result.get("cause") or "")
    with suppress(OSError, ValueError, LookupError, TypeError):
        host = json.loads((directory / REPORT).read_bytes())["error"]["host"]
        return f"host {host}: {cause}" if host else cause
    return cause


def _failed(job: QueuedJob, failure: Mapping[str, Any], now: float) -> Event:
    """Return the event for a start without workers: missing hosts or GPUs deserve another try."""
    code, text = int(failure["code"]), str(failure["text"])
    if job.is_withdrawn:
        return Returned(job.id, now, "", 0.0)
    if code == EXIT_TOO_FEW:
        return Returned(job.id, now, text, now + _FILL_AGAIN)
    if code == EXIT_HOSTS:
        pause = min(_LONGEST, _AGAIN * 2 ** min(job.tries - 1, 10))
        return Returned(job.id, now, text, now + pause)
    return Finished(job.id, now, code, text)


def _start_keeper(directory: Path) -> None:
    """Start the process for restarts of a killed server. Raises OSError."""
    lock = take_lock(directory / MINDER, os.O_CREAT)
    try:
        start_process("hvlaunch.outside.queue_server", "run_keeper", directory, kept=[lock])
    finally:
        os.close(lock)


def run_keeper() -> None:
    """Run the program that starts a killed server again. The queue's directory is its first argument."""
    directory = Path(sys.argv[1])
    queue = Queue(directory)
    while _is_open(queue):
        if has_driver(directory):
            time.sleep(_LOOK)
            continue
        server = start_process("hvlaunch.outside.queue_server", "run_server", directory)
        while server.poll() is None and not has_driver(directory):
            time.sleep(_LOOK / 4)
        if server.poll() is not None:
            # A server that fails at once has a cause that another start does not remove soon.
            time.sleep(_RESTART)


def run_server() -> None:
    """Run the server's program. The queue's directory is its first argument."""
    directory = Path(sys.argv[1])
    while _is_open(Queue(directory)):
        try:
            lock = take_lock(directory / LOCK, os.O_CREAT)
        except BlockingIOError:
            return
        try:
            QueueServer(directory).run()
        finally:
            # Then asked again: a command that has seen the lock has started no server.
            os.close(lock)
