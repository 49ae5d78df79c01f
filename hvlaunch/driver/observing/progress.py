"""Progress of workers by their own reports (hvlaunch.rendezvous.worker)."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from math import exp
from typing import Any, NamedTuple, TypeAlias

from hvlaunch.agent.wire.frames import mapping, number, or_null, record, text, whole
from hvlaunch.driver.process_events import loud
from hvlaunch.rendezvous.messages import LONGEST_NAME, MOST_METRICS, PROGRESS, worker_of
from hvlaunch.rendezvous.serving import RendezvousServer

__all__ = ["Progress", "Steps"]

_LONGEST = 1 << 13
_STEP = whole(0, 1 << 53)
_TOLD = record(
    {
        "step": _STEP,
        "total": or_null(_STEP),
        "metrics": mapping(text(LONGEST_NAME), or_null(number(-1e308, 1e308)), MOST_METRICS),
    },
    optional=("total", "metrics"),
)
_SMOOTHED = 5.0
"""Seconds over which a rate is averaged."""
_TOLD_WITHIN = 1.0
"""Seconds within which a worker reports a step."""

_Worker: TypeAlias = tuple[str, int, int]


class Steps(NamedTuple):
    """Progress of some workers."""

    moved_at: float | None
    """Time of the newest report; None without any report."""
    are_exact: bool
    """True if a worker with reports has steps left."""
    of: Mapping[_Worker, int]
    """Newest step of each worker with reports."""


class _Course:
    """Progress of a worker."""

    def __init__(self, report: Mapping[str, Any], now: float) -> None:
        self.step, self.total, self.metrics = _news(report)
        self.stepped_at = self.moved_at = now
        self.round: int | None = None
        """The newest round at its last report."""
        self.rate: float | None = None
        """Steps per second while the worker makes steps."""

    def go_on(self, report: Mapping[str, Any], now: float) -> None:
        """Record another report."""
        new = _news(report)
        if new != (self.step, self.total, self.metrics):
            self.moved_at = now
        made = report["step"] - self.step
        if made:
            # Two reports may come at the same tick of the clock.
            passed = max(now - self.stepped_at, 1e-3)
            # Exponential average: reports come at irregular times.
            share = 1.0 if self.rate is None else 1 - exp(-passed / _SMOOTHED)
            rate = self.rate or 0.0
            # Steps that go back mean a restart: the old rate says nothing of the new run.
            self.rate = rate + share * (made / passed - rate) if made > 0 else None
            self.stepped_at = now
        self.step, self.total, self.metrics = new

    def rate_at(self, now: float) -> float | None:
        """Return the rate, which decays while the worker makes no step."""
        idle = now - self.stepped_at - _TOLD_WITHIN
        return self.rate if self.rate is None or idle * self.rate <= 1 else 1 / idle


class Progress:
    """Progress of all workers. For any thread; `exists` tells if a worker of this host, slot and start ever existed.

    `note_step` gets the newest round with its first new step; `round_of` returns that round's number.
    """

    def __init__(
        self,
        server: RendezvousServer,
        exists: Callable[[str, int, int], bool],
        clock: Callable[[], float],
        round_of: Callable[[], int | None] = lambda: None,
        note_step: Callable[[int, int], None] = lambda _round, _step: None,
    ) -> None:
        self.server = server
        self.exists = exists
        self.clock = clock
        self.round_of = round_of
        self.note_step = note_step
        self._best = self._noted = -1
        """The highest step of all rounds, and the newest round with a new step."""
        self._courses: dict[_Worker, _Course] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Subscribe to reports until the server closes, beginning with earlier reports."""
        self.server.subscribe(PROGRESS, loud(self._heard), since=0)

    def of(self, worker: _Worker) -> Mapping[str, Any] | None:
        """Return a worker's progress as JSON, if the worker reports any."""
        now = self.clock()
        with self._lock:
            course = self._courses.get(worker)
            if course is None:
                return None
            rate = course.rate_at(now)
            news = {"step": course.step, "total": course.total, "metrics": course.metrics}
        return {**news, "rate": None if rate is None else float(f"{rate:.6g}")}

    def steps(self, workers: Iterable[_Worker]) -> Steps:
        """Return the progress of these workers."""
        with self._lock:
            courses = {worker: self._courses[worker] for worker in workers if worker in self._courses}
            return Steps(
                max((course.moved_at for course in courses.values()), default=None),
                any(course.total is None or course.step < course.total for course in courses.values()),
                {worker: course.step for worker, course in courses.items()},
            )

    def _heard(self, key: str, value: bytes | None, _version: int) -> None:
        """Take a report. Nonsense is ignored: any worker may write to the rendezvous."""
        try:
            worker = worker_of(key)
        except ValueError:
            return
        report = None if value is None or len(value) > _LONGEST else _told(value)
        # A worker can name any other in its key; unknown names would fill memory.
        if report is None or not self.exists(*worker):
            return
        now, number, step = self.clock(), self.round_of(), report["step"]
        with self._lock:
            course = self._courses.get(worker)
            # Steps that begin anew within a round are those of another epoch. In another round the worker has gone back.
            is_new = step > self._best or (
                course is not None and course.round == number and step < course.step
            )
            if course is None:
                course = self._courses[worker] = _Course(report, now)
            else:
                course.go_on(report, now)
            course.round = number
            self._best = max(self._best, step)
            is_first = is_new and number is not None and number > self._noted
            if is_first and number is not None:
                self._noted = number
        if is_first and number is not None:
            self.note_step(number, step)


def _news(report: Mapping[str, Any]) -> tuple[int, int | None, Mapping[str, float | None]]:
    """Return the newest step, the number of steps, and the metrics."""
    return report["step"], report.get("total"), report.get("metrics", {})


def _told(value: bytes) -> Mapping[str, Any] | None:
    try:
        report = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return report if _TOLD(report) else None
