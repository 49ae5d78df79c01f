"""The jobs that this user's machine knows of, by their directories: those that run, and those that ended lately."""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch.errors import BadUsage
from hvlaunch.outside.directory import ABOUT, IN_MAKING, LOCK, RESULT, has_driver, has_minder, remove

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
"""Seconds, for jobs that ended well, and for others."""
_MAKING_TIME = 60.0
"""Seconds after which a directory that is not whole will never be."""
_MINDING = 10.0
"""Seconds within which a minder starts another driver."""
_LOOK = 0.05
_SHORTEST = 4
"""Letters of an id that may stand for all of it."""


class KnownJob(NamedTuple):
    """A job as its directory tells of it. `about` has what was known at its start; `result` how it ended, if it has."""

    id: str
    directory: Path
    about: Mapping[str, Any]
    result: Mapping[str, Any] | None
    has_driver: bool
    """Whether its driver lives. Without it and without a result, the driver was killed."""

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
        """Seconds since the epoch, of a job that has ended; when its directory was last changed, at the latest."""
        with suppress(OSError):
            return self.directory.stat().st_mtime
        return 0.0


def known_jobs(root: Path) -> list[KnownJob]:
    """All of them, the newest last. What is no job's directory is left out."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(root) if not name.startswith(IN_MAKING)]  # noqa: PTH208 (names alone)
        jobs = [job for name in names if (job := known_job(root / name)) is not None]
        return sorted(jobs, key=lambda job: job.began)
    return []


def choose(jobs: Sequence[KnownJob], name: str | None) -> KnownJob:
    """The job of this id (four letters of it will do) or name; without one, the only job that runs, or has lost its driver.

    Raises BadUsage.
    """
    running = [job for job in jobs if job.has_driver]
    running = running or [job for job in jobs if job.result is None]  # it may get another driver
    if name is None:
        if len(running) == 1:
            return running[0]
        if not running:
            raise BadUsage("no job runs here", hint="hvlaunch jobs")
        raise BadUsage(f"{len(running)} jobs run here: {_ids(running)}", hint="name one of them")
    found = [job for job in jobs if name == job.id]
    # Of jobs with the same name those that run come first.
    found = found or [job for job in running if name == job.about.get("name")]
    found = found or [job for job in jobs if name == job.about.get("name")]
    if not found and len(name) >= _SHORTEST:
        found = [job for job in jobs if job.id.startswith(name)]
    if not found:
        raise BadUsage(f"there is no job {name}", hint="hvlaunch jobs")
    if len(found) > 1:
        raise BadUsage(f"{len(found)} jobs are called {name}: {_ids(found)}", hint="the id of one")
    return found[0]


def await_end(job: KnownJob) -> Mapping[str, Any] | None:
    """Wait until the job has no driver any more. How it ended; None where nothing tells, as after a good end."""
    _await_end_of_driver(job)
    while await_driver(job):
        _await_end_of_driver(job)
    return result_of(job)


def await_driver(job: KnownJob) -> bool:
    """Whether it has one, now or in a moment: where a minder watches over the job another driver may be on its way."""
    deadline = time.monotonic() + _MINDING
    while not has_driver(job.directory):
        if result_of(job) is not None or not has_minder(job.directory) or time.monotonic() >= deadline:
            return has_driver(job.directory)
        time.sleep(_LOOK)
    return True


def _await_end_of_driver(job: KnownJob) -> None:
    with suppress(FileNotFoundError):
        descriptor = os.open(job.directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # the kernel lets go of the driver's, however that ends
        finally:
            os.close(descriptor)


def result_of(job: KnownJob) -> Mapping[str, Any] | None:
    """How the job has ended; None where nothing tells."""
    return _read(job.directory / RESULT)


def has_ended(job: KnownJob) -> bool:
    """Whether it has a result, or its directory is gone, as after a good end."""
    return (job.directory / RESULT).exists() or not (job.directory / ABOUT).exists()


def prune(root: Path, now: float | None = None) -> None:
    """Remove what is left of jobs that ended, but for the newest 20 of a week, and the newest 20 of a day that ended well."""
    now = time.time() if now is None else now
    with suppress(OSError):
        for name in os.listdir(root):  # noqa: PTH208 (names alone)
            if name.startswith(IN_MAKING) and (root / name).stat().st_mtime < now - _MAKING_TIME:
                _try_to_remove(root / name)
    over = [job for job in known_jobs(root) if not job.has_driver]
    for ended_well, kept_for in _KEPT_FOR.items():
        each = sorted((job for job in over if job.ended_well == ended_well), key=lambda job: job.ended)
        old = [job for job in each[-_KEPT:] if job.ended < now - kept_for]
        for job in (*each[:-_KEPT], *old):
            _try_to_remove(job.directory)


def _try_to_remove(directory: Path) -> None:
    with suppress(OSError):  # another driver may do the same
        remove(directory)


def known_job(directory: Path) -> KnownJob | None:
    """The job of this directory; None where it has none."""
    about = _read(directory / ABOUT)
    if about is None:
        return None
    runs = has_driver(directory)  # first: the result is there before it ends
    return KnownJob(directory.name, directory, about, _read(directory / RESULT), runs)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _ids(jobs: Iterable[KnownJob]) -> str:
    return ", ".join(job.id for job in jobs)
