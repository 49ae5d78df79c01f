"""What the job's hosts and workers do, as long as somebody wants to know."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from hvlaunch.driver.observing.observers import Answer, Observers, Target
from hvlaunch.telemetry.sample import HostSample, as_json, host_sample

__all__ = ["Observation"]

_LEAST_INTERVAL = 1.0
_WITHIN = 5.0
_FRESH = 2.5
"""Seconds within which a round of samples is as good as a new one."""


class Observation:
    """For any thread. Asks all hosts as often as the most eager subscriber wants, and nothing where there is none.

    `cwd` is the job's.
    """

    def __init__(self, observers: Observers, cwd: str, clock: Callable[[], float]) -> None:
        self._observers = observers
        self._cwd = cwd
        self._clock = clock
        self._lock = threading.RLock()
        self._intervals: dict[object, float] = {}
        self._kept_until = 0.0
        self._is_sampling = self._is_asking = False
        self._there: dict[str, Mapping[int, float]] = {}
        """When their ranks have printed last: the hosts that could be asked in the newest round."""
        self._open: set[str] = set()
        """Those that have not answered yet."""
        self._complete_at: float | None = None
        """When all had answered."""
        self._newest: dict[str, HostSample] = {}
        self._problems: dict[str, str] = {}
        self._calls: list[_Once] = []

    def subscribe(self, interval: float = _LEAST_INTERVAL) -> Callable[[], None]:
        """Have samples taken every so many seconds, of one at least; what ends that."""
        subscriber = object()
        with self._lock:
            self._intervals[subscriber] = max(_LEAST_INTERVAL, interval)
            self._begin()

        def end() -> None:
            with self._lock:
                self._intervals.pop(subscriber, None)

        return end

    def keep_on(self, seconds: float) -> None:
        """Subscribe for so long, from now."""
        with self._lock:
            self._kept_until = max(self._kept_until, self._clock() + seconds)
            self._begin()

    def newest(self) -> list[HostSample]:
        """The newest sample of each host that is there and has any: `time` says how old it is."""
        with self._lock:
            return [sample for host, sample in self._newest.items() if host in self._there]

    def problems(self) -> Mapping[str, str]:
        """Why there is no fresh sample, by host."""
        with self._lock:
            return {host: why for host, why in self._problems.items() if host in self._there}

    def as_json(self) -> dict[str, Any]:
        """What there is now, for programs."""
        hosts = [as_json(sample) for sample in self.newest()]
        return {"now": self._clock(), "hosts": hosts, "problems": dict(self.problems())}

    def when_fresh(self, within: float, call: Callable[[], None]) -> None:
        """Have it called once, as soon as all hosts have answered lately, but `within` so many seconds; by the agenda."""
        once = _Once(call)
        with self._lock:
            now = self._clock()
            is_fresh = self._complete_at is not None and now < self._complete_at + _FRESH
            if not is_fresh:
                self._calls.append(once)
        self._observers.at(now if is_fresh else now + within, once)

    def _begin(self) -> None:
        if not self._is_sampling:
            self._is_sampling = True
            self._observers.at(self._clock(), self._take)

    def _take(self) -> None:
        """One round: ask whoever is not still at the question before."""
        now = self._clock()
        with self._lock:
            if not self._intervals and now >= self._kept_until:
                self._is_sampling = False
                return
            self._there.clear()
            interval = min(self._intervals.values(), default=_LEAST_INTERVAL)
            self._observers.at(now + interval, self._take)
            self._is_asking = True
            self._observers.ask("samples", self._question, _WITHIN, self._heard)
            self._is_asking = False
            self._look_whether_complete()

    def _question(self, target: Target) -> Mapping[str, Any] | None:
        self._there[target.host] = target.last_output
        if target.host in self._open:
            return None
        self._open.add(target.host)
        paths = {"cwd": self._cwd, "scratch": target.scratch, "shm": "/dev/shm"}  # noqa: S108 (it is only looked at)
        return {"workers": list(target.workers.items()), "paths": paths}

    def _heard(self, answer: Answer) -> None:
        now = self._clock()
        sample = None
        if answer.problem is None:
            last = self._there.get(answer.host, {})
            sample = host_sample(answer.host, now, answer.found, last)
        with self._lock:
            self._open.discard(answer.host)
            if sample is None:
                self._problems[answer.host] = answer.problem or "its observer sent what is no sample"
            else:
                self._newest[answer.host] = sample
                self._problems.pop(answer.host, None)
            self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        if self._open or self._is_asking:
            return
        self._complete_at = self._clock()
        calls, self._calls = self._calls, []
        for call in calls:
            self._observers.at(self._complete_at, call)


class _Once:
    """Calls once, however often it is called; for one thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
