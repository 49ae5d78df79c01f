"""The jobs of this user on this machine, by their directories: running jobs, and jobs that ended lately."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch.errors import BadUsage
from hvlaunch.outside.directory import (
    ABOUT,
    IN_MAKING,
    KEYS,
    LOCK,
    RESULT,
    NoJobDirectory,
    check_root,
    has_driver,
    has_minder,
    is_own_directory,
    remove,
    remove_secrets,
    take_lock,
)

__all__ = [
    "KnownJob",
    "await_driver",
    "await_end",
    "choose",
    "has_ended",
    "known_job",
    "known_jobs",
    "prune",
    "result_of",
]

_KEPT = 20
_DAY = 86400.0
_KEPT_FOR = {True: _DAY, False: 7 * _DAY}
"""Seconds for which a directory is kept, by whether the job ended well."""
_INCOMPLETE = re.compile(re.escape(IN_MAKING) + "[0-9a-f]{12}")
"""Names of incomplete directories of jobs."""
_MAKING_TIME = 60.0
"""Seconds after which an incomplete directory is abandoned."""
_LEASE = 3600.0
"""Seconds, for jobs whose lease is unknown."""
_MARGIN = 60.0
"""Seconds beyond the lease, in which agents end their workers."""
_MINDING = 10.0
"""Seconds within which a minder starts another driver."""
_LOOK = 0.05
_SHORTEST = 4
"""Letters that an abbreviated id needs."""


class KnownJob(NamedTuple):
    """A job by its directory: `about` has the facts of the start, `result` the end, if the job has ended."""

    id: str
    directory: Path
    about: Mapping[str, Any]
    result: Mapping[str, Any] | None
    has_driver: bool
    """True if the driver lives. A job without a driver and a result has lost its driver."""

    @property
    def label(self) -> str:
        """The job in words: `job 4a5fac6ebd8e (base)`."""
        name = self.about.get("name")
        return f"job {self.id} ({name})" if name else f"job {self.id}"

    @property
    def is_elastic(self) -> bool:
        return bool(self.about.get("is_elastic"))

    @property
    def never_ran(self) -> bool:
        """True if the job ended before a worker of it was started."""
        return self.result is not None and self.result.get("has_run") is False

    @property
    def began(self) -> float:
        """Seconds since the epoch."""
        began = self.about.get("began")
        return float(began) if isinstance(began, int | float) else 0.0

    @property
    def ended_well(self) -> bool:
        return self.result is not None and self.result.get("exit_code") == 0

    @property
    def ended(self) -> float:
        """Seconds since the epoch, of a job that has ended: the last change of its directory."""
        with suppress(OSError):
            return self.directory.lstat().st_mtime
        return 0.0


def known_jobs(root: Path) -> list[KnownJob]:
    """Return all jobs, the newest last. Links, and directories of other users, are ignored.

    Raises NoJobDirectory if another user could put directories there.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        check_root(root)
        names = [name for name in os.listdir(root) if not name.startswith(IN_MAKING)]  # noqa: PTH208 (names alone)
        jobs = [job for name in names if (job := known_job(root / name)) is not None]
        return sorted(jobs, key=lambda job: job.began)
    return []


def choose(jobs: Sequence[KnownJob], name: str | None) -> KnownJob:
    """Return the job with this id (four letters suffice) or name; without a name, the only job that runs or lost its driver.

    Raises BadUsage.
    """
    running = [job for job in jobs if job.has_driver]
    # A successor may take such a job over.
    running = running or [job for job in jobs if job.result is None]
    if name is None:
        if len(running) == 1:
            return running[0]
        if not running:
            raise BadUsage("no job runs here", hint="hvlaunch jobs")
        raise BadUsage(f"{len(running)} jobs run here: {_ids(running)}", hint="name one of them")
    matches = [job for job in jobs if name == job.id]
    # Running jobs come first among those with the same name.
    matches = matches or [job for job in running if name == job.about.get("name")]
    matches = matches or [job for job in jobs if name == job.about.get("name")]
    if not matches and len(name) >= _SHORTEST:
        matches = [job for job in jobs if job.id.startswith(name)]
    if not matches:
        raise BadUsage(f"there is no job {name}", hint="hvlaunch jobs")
    if len(matches) > 1:
        raise BadUsage(f"{len(matches)} jobs are called {name}: {_ids(matches)}", hint="the id of one")
    return matches[0]


def await_end(job: KnownJob) -> Mapping[str, Any] | None:
    """Wait until the job has no driver; return the kept result, or None, as after a good end."""
    # Not by a lock that blocks: a process that is stopped just as it gets the lock would keep successors from it.
    while await_driver(job):
        time.sleep(_LOOK)
    return result_of(job)


def await_driver(job: KnownJob) -> bool:
    """True if the job has a driver, or gets a successor within some seconds: a minder starts one."""
    deadline = time.monotonic() + _MINDING
    while not has_driver(job.directory):
        if result_of(job) is not None or not has_minder(job.directory) or time.monotonic() >= deadline:
            return has_driver(job.directory)
        time.sleep(_LOOK)
    return True


def result_of(job: KnownJob) -> Mapping[str, Any] | None:
    """Return the job's kept result, or None."""
    return _read(job.directory / RESULT)


def has_ended(job: KnownJob) -> bool:
    """True if the job has a result, or if its directory is gone, as after a good end."""
    return (job.directory / RESULT).exists() or not (job.directory / ABOUT).exists()


def prune(root: Path, now: float | None = None) -> None:
    """Remove the directories of ended jobs, except the newest 20 failed ones of a week and the newest 20 good ones of a day.

    Jobs without a driver lose their secrets as soon as no successor can take them over.
    """
    now = time.time() if now is None else now
    try:
        jobs = known_jobs(root)
        # The root is checked: through a planted link these could be hidden directories of any kind, such as .git.
        for name in os.listdir(root):  # noqa: PTH208 (names alone)
            if _INCOMPLETE.fullmatch(name) and (root / name).lstat().st_mtime < now - _MAKING_TIME:
                _try_to_remove(root / name)
    except (OSError, NoJobDirectory):
        return
    over = [job for job in jobs if not job.has_driver]
    for job in over:
        if (job.directory / KEYS).exists() and (job.result is not None or _is_dead(job, now)):
            _try_to_remove_secrets(job)
    for ended_well, kept_for in _KEPT_FOR.items():
        ended = sorted((job for job in over if job.ended_well == ended_well), key=lambda job: job.ended)
        old = [job for job in ended[-_KEPT:] if job.ended < now - kept_for]
        for job in (*ended[:-_KEPT], *old):
            _try_to_remove(job.directory)


def _try_to_remove(directory: Path) -> None:
    with suppress(OSError):
        # Another driver may prune at the same time.
        remove(directory)


def _is_dead(job: KnownJob, now: float) -> bool:
    """True if the job has been without a driver for longer than its agents wait."""
    lease = job.about.get("lease")
    patience = (lease if isinstance(lease, int | float) else _LEASE) + _MARGIN
    try:
        # A driver renews the time while it lives.
        renewed = (job.directory / KEYS).lstat().st_mtime
    except OSError:
        return False
    # Locks of another machine's processes can't be seen from here, if a home directory is shared.
    is_here = job.about.get("machine") == os.uname().nodename
    return is_here and now > renewed + patience and not has_minder(job.directory)


def _try_to_remove_secrets(job: KnownJob) -> None:
    with suppress(OSError):
        # Under the lock: a successor that has just begun keeps its keys.
        lock = take_lock(job.directory / LOCK)
        try:
            remove_secrets(job.directory)
        finally:
            os.close(lock)


def known_job(directory: Path) -> KnownJob | None:
    """Return the job of this directory, or None, also if the directory is a link or another user can write to it."""
    if not is_own_directory(directory):
        return None
    about = _read(directory / ABOUT)
    if about is None:
        return None
    if not isinstance(name := about.get("name") or "", str) or not name.isprintable():
        # Another version's, or damaged: it must not move a terminal's cursor, or look like another row of a table.
        about = {**about, "name": ascii(name)[1:-1]}
    # Asked before the result is read: a driver writes the result before it releases the lock.
    runs = has_driver(directory)
    return KnownJob(directory.name, directory, about, _read(directory / RESULT), runs)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _ids(jobs: Iterable[KnownJob]) -> str:
    return ", ".join(job.id for job in jobs)
