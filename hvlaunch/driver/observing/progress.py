"""How far workers are, by what they tell themselves (hvlaunch.rendezvous.telling)."""

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from math import exp
from typing import Any, NamedTuple, TypeAlias

from hvlaunch.agent.wire.shapes import mapping, number, or_null, record, text, whole
from hvlaunch.driver.process_events import loud
from hvlaunch.rendezvous.serving.server import RendezvousServer
from hvlaunch.rendezvous.telling import LONGEST_NAME, MOST_METRICS, PROGRESS

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
"""Seconds over which a rate is a mean."""
_TOLD_WITHIN = 1.0
"""Seconds after which each step has been told."""

_Worker: TypeAlias = tuple[str, int, int]


class Steps(NamedTuple):
    """Where some workers are."""

    moved_at: float | None
    """When one of them has last told anything new; None where none ever told anything."""
    are_exact: bool
    """Whether one that has told steps is not through with them."""
    of: Mapping[_Worker, int]
    """The newest step of each that has told any."""


class _Course:
    """One worker's."""

    def __init__(self, told: Mapping[str, Any], now: float) -> None:
        self.step, self.total, self.metrics = _news(told)
        self.stepped_at = self.moved_at = now
        self.rate: float | None = None
        """Steps a second, as long as there were any."""

    def go_on(self, told: Mapping[str, Any], now: float) -> None:
        """More was told."""
        new = _news(told)
        if new != (self.step, self.total, self.metrics):
            self.moved_at = now
        made = told["step"] - self.step
        if made:
            passed = max(now - self.stepped_at, 1e-3)
            share = 1.0 if self.rate is None else 1 - exp(-passed / _SMOOTHED)
            rate = self.rate or 0.0
            self.rate = rate + share * (made / passed - rate) if made > 0 else None
            self.stepped_at = now
        self.step, self.total, self.metrics = new

    def rate_at(self, now: float) -> float | None:
        """One that makes no step any more gets slower and slower."""
        idle = now - self.stepped_at - _TOLD_WITHIN
        return self.rate if self.rate is None or idle * self.rate <= 1 else 1 / idle


class Progress:
    """For any thread. `exists` tells whether there ever was a worker of this host, slot and start."""

    def __init__(
        self,
        server: RendezvousServer,
        exists: Callable[[str, int, int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.server = server
        self.exists = exists
        self.clock = clock
        self._courses: dict[_Worker, _Course] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Listen to workers until the server closes, at first to what they have told before."""
        self.server.subscribe(PROGRESS, loud(self._heard), since=0)

    def of(self, worker: _Worker) -> Mapping[str, Any] | None:
        """For programs; None where it has told nothing."""
        now = self.clock()
        with self._lock:
            course = self._courses.get(worker)
            if course is None:
                return None
            rate = course.rate_at(now)
            known = {"step": course.step, "total": course.total, "metrics": course.metrics}
        return {**known, "rate": None if rate is None else float(f"{rate:.6g}")}

    def steps(self, workers: Iterable[_Worker]) -> Steps:
        """Where these are."""
        with self._lock:
            known = {worker: self._courses[worker] for worker in workers if worker in self._courses}
            return Steps(
                max((one.moved_at for one in known.values()), default=None),
                any(one.total is None or one.step < one.total for one in known.values()),
                {worker: one.step for worker, one in known.items()},
            )

    def _heard(self, key: str, value: bytes | None, _version: int) -> None:
        """Nonsense from a worker is none of our business."""
        from hvlaunch.rendezvous.round_messages import worker_of  # noqa: PLC0415 (few workers tell anything)

        try:
            worker = worker_of(key)
        except ValueError:
            return
        told = None if value is None or len(value) > _LONGEST else _told(value)
        if told is None or not self.exists(*worker):
            return
        now = self.clock()
        with self._lock:
            course = self._courses.get(worker)
            if course is None:
                self._courses[worker] = _Course(told, now)
            else:
                course.go_on(told, now)


def _news(told: Mapping[str, Any]) -> tuple[int, int | None, Mapping[str, float | None]]:
    """The newest step, of how many, and the metrics."""
    return told["step"], told.get("total"), told.get("metrics", {})


def _told(value: bytes) -> Mapping[str, Any] | None:
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return told if _TOLD(told) else None
