"""The user's queue of jobs: the list on disk, a directory for each submission, and the decisions which job starts next.

Commands and the queue's server (queue_server.py) append events to one log, each under the lock of the log: a removed job
is not started. The server is needed for starts alone. The schedule is pure: events change the list, and decide() returns actions.

Jobs start in their order. While a job waits at its hosts, later jobs with a common host stay in the queue. A job with a time
limit may pass (backfill) if its end comes before the promised start of the waiting job, or if the waiting job has enough GPUs
anyway.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Literal

from hvlaunch.errors import EXIT_NOT_WRITTEN, HvlaunchError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import jobs_directory
from hvlaunch.outside.shared_log import LogContent, SharedLog
from hvlaunch.owners import write_whole

__all__ = [
    "ACTIVE",
    "ENVIRONMENT",
    "MARGIN",
    "OPEN",
    "SPECS",
    "Action",
    "Added",
    "Event",
    "Finished",
    "Held",
    "Moved",
    "Queue",
    "QueueEntry",
    "QueueNotWritten",
    "QueuedJob",
    "Released",
    "Removed",
    "Returned",
    "Running",
    "Schedule",
    "StartJob",
    "Starting",
    "StopJob",
    "WithdrawJob",
    "Withdrawn",
    "event_of",
    "queue_beside",
    "queue_directory",
    "words_of",
]

MARGIN = 60.0
"""Seconds beyond the time limit for the start and the end of a job."""
_KEPT = 50
"""Number of ended jobs in the list, without the jobs of others' `after`."""
ACTIVE = ("starting", "running")


class QueuedJob(NamedTuple):
    """A job of the list: the request, then its history."""

    id: str
    """`12`, or `12_3` for task 3 of an array."""
    name: str
    command: str
    added: float
    """Seconds since the epoch, as other times here."""
    hosts: tuple[str, ...]
    workers: int
    per_worker: int
    """GPUs or slots of each worker."""
    noun: str = "GPU"
    fair_wait: float = 600.0
    time_limit: float | None = None
    after: tuple[tuple[str, str], ...] = ()
    """Jobs to end first, each with `ok` (well) or `any`."""
    most: int | None = None
    """Most tasks of its array at a time."""
    is_held: bool = False
    priority: int = 0
    state: Literal["waiting", "starting", "running", "ended"] = "waiting"
    since: float = 0.0
    """Begin of the state."""
    job: str = ""
    """The job's id for other commands, from its start on."""
    is_backfill: bool = False
    units: Mapping[str, int] = {}
    """Its GPUs or slots by host, while it runs."""
    tries: int = 0
    not_before: float = 0.0
    reason: str = ""
    """Cause of a failed start, or of the end."""
    code: int | None = None
    is_removed: bool = False
    is_withdrawn: bool = False
    """True for a starting job without the right to get GPUs."""

    @property
    def array(self) -> str:
        """The number common to the tasks of its array."""
        return self.id.partition("_")[0]

    @property
    def ended_well(self) -> bool:
        return self.state == "ended" and self.code == 0

    @property
    def outcome(self) -> str:
        """Its end in words."""
        code = "" if self.code is None else f"exit code {self.code}"
        return ", ".join(words for words in (code, self.reason) if words)

    def room(self, free: Mapping[str, float]) -> float:
        """Return the number of workers with room on these GPUs."""
        return sum(free.get(host, 0) // self.per_worker for host in self.hosts)


class Added(NamedTuple):
    """Jobs were queued."""

    jobs: tuple[QueuedJob, ...]
    next: int = 1
    """The number of the next job is at least this."""


class Removed(NamedTuple):
    """The user wants a job no more."""

    id: str
    at: float


class Moved(NamedTuple):
    """A job goes before the others."""

    id: str


class Held(NamedTuple):
    """A job stays in the queue."""

    id: str


class Released(NamedTuple):
    """A job may start, even after failed jobs of its `after`."""

    id: str


class Starting(NamedTuple):
    """The job's process is about to be started, with this id."""

    id: str
    job: str
    at: float
    is_backfill: bool


class Withdrawn(NamedTuple):
    """A starting job must not get GPUs any more, and comes back."""

    id: str


class Running(NamedTuple):
    """The job has its GPUs, and its workers start: the job is never started again."""

    id: str
    at: float
    units: Mapping[str, int]


class Returned(NamedTuple):
    """The start has failed before any worker: the job waits again."""

    id: str
    at: float
    reason: str
    not_before: float


class Finished(NamedTuple):
    """The job has ended."""

    id: str
    at: float
    code: int | None
    reason: str


Event = Added | Removed | Moved | Held | Released | Starting | Withdrawn | Running | Returned | Finished
_EVENTS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (Added, Removed, Moved, Held, Released, Starting, Withdrawn, Running, Returned, Finished)
}


class StartJob(NamedTuple):
    """Start this job; a backfill must not wait for GPUs."""

    id: str
    is_backfill: bool


class WithdrawJob(NamedTuple):
    """Call back a job without GPUs; a job with GPUs continues."""

    id: str


class StopJob(NamedTuple):
    """Stop a job."""

    id: str


Action = StartJob | WithdrawJob | StopJob


def words_of(event: Event) -> list[Any]:
    """Return the event for JSON."""
    if isinstance(event, Added):
        # Most fields are the default ones.
        return ["Added", [_given(job) for job in event.jobs], event.next]
    return [type(event).__name__, *event]


def _given(job: QueuedJob) -> dict[str, Any]:
    defaults = QueuedJob._field_defaults
    return {
        name: value
        for name, value in job._asdict().items()
        if name not in defaults or value != defaults[name]
    }


def event_of(words: Sequence[Any]) -> Event:
    """Return the event of these words. Raises ValueError, TypeError, KeyError, AttributeError."""
    name, *fields = words
    if name == "Added":
        return Added(tuple(_job_of(job) for job in fields[0]), fields[1])
    event: Event = _EVENTS[name](*fields)
    return event


def _job_of(words: Mapping[str, Any]) -> QueuedJob:
    job = QueuedJob(**words)
    return job._replace(hosts=tuple(job.hosts), after=tuple((name, kind) for name, kind in job.after))


class Schedule:
    """The list of jobs, made by events."""

    def __init__(self) -> None:
        self.jobs: dict[str, QueuedJob] = {}
        """In the order of their submission."""
        self.next = 1
        """The number of the next job."""
        self._tasks: dict[str, list[str]] = {}
        """Ids of the tasks by array."""

    def apply(self, event: Event) -> None:
        """Change the list by an event. Events of unknown or ended jobs have no effect."""
        if isinstance(event, Added):
            for job in event.jobs:
                self.jobs[job.id] = job
                self._tasks.setdefault(job.array, []).append(job.id)
                self.next = max(self.next, event.next, int(job.array) + 1)
            return
        job_now = self.jobs.get(event.id)
        if job_now is None or job_now.state == "ended":
            return
        self.jobs[event.id] = self._changed(job_now, event)
        if self.jobs[event.id].state == "ended":
            self._forget()

    def _changed(self, job: QueuedJob, event: Event) -> QueuedJob:
        match event:
            case Removed(_, at) if job.state not in ACTIVE:
                return job._replace(state="ended", since=at, reason="removed", is_removed=True)
            case Removed():
                return job._replace(is_removed=True)
            case Moved():
                # Also before the jobs that were moved to the front earlier.
                return job._replace(priority=1 + max(other.priority for other in self.jobs.values()))
            case Held():
                return job._replace(is_held=True)
            case Released():
                return job._replace(is_held=False, not_before=0.0, after=(*self._open(job),))
            case Starting(_, job_id, at, is_backfill):
                return job._replace(
                    state="starting", job=job_id, since=at, is_backfill=is_backfill, tries=job.tries + 1
                )
            case Withdrawn():
                return job._replace(is_withdrawn=job.state == "starting")
            case Running(_, at, units):
                return job._replace(state="running", since=at, units=units, reason="")
            case Returned(_, at, reason, _) if job.is_removed:
                return job._replace(state="ended", since=at, reason=reason or "removed")
            case Returned(_, at, reason, not_before):
                return job._replace(
                    state="waiting",
                    since=at,
                    reason=reason,
                    not_before=not_before,
                    is_backfill=False,
                    is_withdrawn=False,
                )
            case Finished(_, at, code, reason):
                return job._replace(state="ended", since=at, code=code, reason=reason)
        return job

    def _open(self, job: QueuedJob) -> Iterator[tuple[str, str]]:
        """Yield the unfinished part of `after`, with `any`."""
        for name, _ in job.after:
            if any(other.state != "ended" for other in self.named(name)):
                yield name, "any"

    def _forget(self) -> None:
        """Drop the oldest ended jobs, except jobs in the `after` of open jobs."""
        # Later jobs may name ended ones in --after, so some are kept, and the oldest go.
        needed = {name for job in self.jobs.values() if job.state != "ended" for name, _ in job.after}
        ended = [
            job
            for job in self.jobs.values()
            if job.state == "ended" and not {job.id, job.array} & needed and not self._is_open(job.array)
        ]
        for job in sorted(ended, key=lambda job: job.since)[:-_KEPT]:
            del self.jobs[job.id]

    def _is_open(self, array: str) -> bool:
        return any(job.state != "ended" for job in self.named(array))

    def named(self, name: str) -> list[QueuedJob]:
        """Return the job with this id, or the tasks of the array."""
        return [self.jobs[task] for task in self._tasks.get(name, (name,)) if task in self.jobs]

    def in_order(self) -> list[QueuedJob]:
        """Return the open jobs in the order of their starts."""
        return sorted(
            (job for job in self.jobs.values() if job.state != "ended"), key=lambda job: -job.priority
        )

    def decide(self, now: float, free: Mapping[str, int]) -> list[Action]:
        """Return the actions for this moment. `free` has free GPUs by host, for hosts seen by a waiting job."""
        actions: list[Action] = []
        order = self.in_order()
        active = Counter(job.array for job in order if job.state in ACTIVE)
        heads = [job for job in order if job.state == "starting" and not job.is_backfill]
        # Order counts among jobs with a common host; jobs on other hosts start side by side.
        blocked = {host for head in heads for host in head.hosts}
        # A job that starts in this turn has not taken its GPUs yet, so `free` is too high for its hosts.
        fresh: set[str] = set()
        is_filling = any(job.state == "starting" and job.is_backfill for job in order)
        for job in order:
            if job.state in ACTIVE:
                actions += self._ends(job, now)
                continue
            if self._waits_by_itself(job, now) or (job.most is not None and active[job.array] >= job.most):
                continue
            hosts = {*job.hosts}
            if blocked.isdisjoint(hosts):
                actions.append(StartJob(job.id, is_backfill=False))
                active[job.array] += 1
                fresh |= hosts
            else:
                mine = [head for head in heads if not hosts.isdisjoint(head.hosts)]
                # It comes before them by the user's word.
                later = [head for head in mine if head.priority < job.priority]
                actions += [WithdrawJob(head.id) for head in later if not head.is_withdrawn]
                may_pass = not later and not is_filling and mine and fresh.isdisjoint(hosts)
                if may_pass and self._may_pass(job, mine, now, free):
                    actions.append(StartJob(job.id, is_backfill=True))
                    active[job.array] += 1
                    is_filling = True
                    continue
            blocked |= hosts
        return list(dict.fromkeys(actions))

    def _ends(self, job: QueuedJob, now: float) -> Iterator[Action]:
        is_over = job.state == "running" and job.time_limit is not None and now >= job.since + job.time_limit
        if job.state == "starting" and (job.is_held or job.is_removed) and not job.is_withdrawn:
            yield WithdrawJob(job.id)
        elif job.state == "running" and (job.is_removed or is_over):
            yield StopJob(job.id)

    def _waits_by_itself(self, job: QueuedJob, now: float) -> bool:
        """True if the job could not start even alone."""
        return job.is_held or now < job.not_before or any(self._unmet(job))

    def _unmet(self, job: QueuedJob) -> Iterator[tuple[str, list[QueuedJob]]]:
        """Yield each unmet name of `after`, with its failed jobs; without failed jobs, the name is open."""
        for name, kind in job.after:
            others = self.named(name)
            if kind == "ok" and (failed := [o for o in others if o.state == "ended" and not o.ended_well]):
                yield name, failed
            elif any(other.state != "ended" for other in others):
                yield name, []

    def _may_pass(
        self, job: QueuedJob, heads: Sequence[QueuedJob], now: float, free: Mapping[str, int]
    ) -> bool:
        """True if the job has room now, and does not delay these waiting jobs."""
        if job.time_limit is None or job.room(free) < job.workers:
            return False
        return all({*head.hosts} <= free.keys() and self._is_no_delay(job, head, now, free) for head in heads)

    def _is_no_delay(self, job: QueuedJob, head: QueuedJob, now: float, free: Mapping[str, int]) -> bool:
        promised = self.promise(head, now, free)
        if promised == inf:
            # Others hold the GPUs, and nobody knows how long: no job may wait for ever.
            return now < head.since + head.fair_wait
        # In the worst case each of its GPUs takes the room of a worker.
        spare = head.room(self._free_at(promised, now, free)) - job.workers * job.per_worker
        return now + (job.time_limit or 0.0) + MARGIN <= promised or spare >= head.workers

    def promise(self, job: QueuedJob, now: float, free: Mapping[str, int]) -> float:
        """Return the latest start of the job by the time limits of running jobs; infinite without enough limits."""
        ends = {end for other in self._running() if (end := self._end(other, now)) < inf}
        # In the worst case, each GPU of a backfill that starts just now is the room of a worker.
        filling = [
            (now + (other.time_limit or inf) + MARGIN, other.workers * other.per_worker)
            for other in self.jobs.values()
            if other.state == "starting" and other.is_backfill and not other.is_withdrawn
        ]
        for at in (now, *sorted(ends | {end for end, _ in filling})):
            room = job.room(self._free_at(at, now, free))
            if room - sum(size for end, size in filling if at < end) >= job.workers:
                return at
        return inf

    def _running(self) -> Iterable[QueuedJob]:
        return (job for job in self.jobs.values() if job.state == "running")

    @staticmethod
    def _end(job: QueuedJob, now: float) -> float:
        return inf if job.time_limit is None else max(now, job.since + job.time_limit + MARGIN)

    def _free_at(self, at: float, now: float, free: Mapping[str, int]) -> Mapping[str, float]:
        room: Counter[str] = Counter(free)
        for job in self._running():
            if self._end(job, now) <= at < inf:
                room.update(job.units)
        return room

    def waits_for(self, job: QueuedJob, now: float) -> str:
        """Return why a job is still in the queue, in words; empty just before its start."""
        if job.is_held:
            return "held"
        for name, failed in self._unmet(job):
            if failed:
                return f"never: {failed[0].id} has failed, {failed[0].outcome}"
            return f"after {name}"
        if now < job.not_before:
            return f"{job.reason}; again in {job.not_before - now:.0f} s"
        active = [other for other in self.named(job.array) if other.state in ACTIVE]
        if job.most is not None and len(active) >= job.most:
            return f"{len(active)} of its array"
        order = self.in_order()
        for other in order[: order.index(job)]:
            is_between = other.state in ("waiting", "starting") and not other.is_backfill
            if is_between and not self._waits_by_itself(other, now) and set(other.hosts) & set(job.hosts):
                return f"behind {other.id}"
        return ""


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
