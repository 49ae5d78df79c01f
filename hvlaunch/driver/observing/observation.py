"""Samples of the job's hosts, taken while they have subscribers."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from hvlaunch.agent.wire.frames import flag, or_null, record, text
from hvlaunch.driver.observing import Answer, Observers, Target
from hvlaunch.owners import write_whole
from hvlaunch.telemetry.sample import Energy, HostSample, as_json, host_sample

__all__ = ["Observation"]

_READY = record({"is_ready": flag, "problem": or_null(text(256))})
_LEAST_INTERVAL = 1.0
_WITHIN = 5.0
_FRESH = 2.5
"""Seconds within which a round of samples counts as new."""
_KEEP_EVERY = 10.0


class Observation:
    """Asks all hosts as often as the most eager subscriber wants, and never without subscribers. For any thread.

    `cwd` is the job's. The file `kept` has the energy for a successor of this driver.
    """

    def __init__(
        self, observers: Observers, cwd: str, clock: Callable[[], float], kept: Path | None = None
    ) -> None:
        self._observers = observers
        self._cwd = cwd
        self._clock = clock
        # Re-entrant: an answer may come within ask(), which is called with the lock held.
        self._lock = threading.RLock()
        self._intervals: dict[object, float] = {}
        self._kept_until = 0.0
        self._is_sampling = self._is_asking = False
        self._there: dict[str, Mapping[int, float]] = {}
        """Times of the last output by rank, for the hosts of the newest round."""
        self._open: set[str] = set()
        """Hosts without an answer yet."""
        self._complete_at: float | None = None
        """Time at which the last round was complete."""
        self._newest: dict[str, HostSample] = {}
        self._problems: dict[str, str] = {}
        self._kept = kept
        self._energy = _kept_energy(kept)
        self._energy_kept_at = -inf
        self._calls: list[_Once] = []

    def subscribe(self, interval: float = _LEAST_INTERVAL) -> Callable[[], None]:
        """Have samples taken every `interval` seconds, a second at least. Call the result to unsubscribe."""
        subscriber = object()
        with self._lock:
            self._intervals[subscriber] = max(_LEAST_INTERVAL, interval)
            self._begin()

        def end() -> None:
            with self._lock:
                self._intervals.pop(subscriber, None)

        return end

    def keep_on(self, seconds: float) -> None:
        """Subscribe for some seconds from now."""
        with self._lock:
            self._kept_until = max(self._kept_until, self._clock() + seconds)
            self._begin()

    def ask_ready(self, port: int | None, url: str | None, give: Callable[[Mapping[str, Any]], None]) -> None:
        """Have rank 0's host look whether the service answers; `give` gets `is_ready` and `problem`, in any thread."""

        def answered(answer: Answer) -> None:
            is_good = answer.problem is None and _READY(answer.value)
            problem = answer.problem or "its host sent an invalid answer"
            give(answer.value if is_good else {"is_ready": False, "problem": problem})

        def question(target: Target) -> Mapping[str, Any] | None:
            return {"port": port, "url": url, "seconds": 0} if 0 in target.workers else None

        if not self._observers.ask("ready", question, _WITHIN, answered):
            give({"is_ready": False, "problem": "rank 0 does not run"})

    def newest(self) -> list[HostSample]:
        """Return the newest sample of each host in the newest round. Its `time` tells its age."""
        with self._lock:
            return [sample for host, sample in self._newest.items() if host in self._there]

    def problems(self) -> Mapping[str, str]:
        """Return the reasons for missing samples by host."""
        with self._lock:
            return {host: why for host, why in self._problems.items() if host in self._there}

    def energy(self) -> tuple[float, float]:
        """Return the joules of the job's GPUs, and the seconds of GPUs for which they were counted."""
        with self._lock:
            return self._energy.joules, self._energy.seconds

    def _keep_energy(self, now: float) -> None:
        if self._kept is None or not self._energy.seconds or now < self._energy_kept_at + _KEEP_EVERY:
            return
        self._energy_kept_at = now
        # A full disk costs a successor's bill the energy.
        with suppress(OSError):
            write_whole(self._kept, json.dumps([self._energy.joules, self._energy.seconds]).encode(), 0o600)

    def as_json(self) -> dict[str, Any]:
        """Return the newest samples and problems as JSON."""
        hosts = [as_json(sample) for sample in self.newest()]
        return {"now": self._clock(), "hosts": hosts, "problems": dict(self.problems())}

    def when_fresh(self, within: float, call: Callable[[], None]) -> None:
        """Call once as soon as all hosts have a fresh sample, `within` seconds at the latest; on the agenda's thread."""
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
        """Begin a round: ask every host without an open question."""
        now = self._clock()
        with self._lock:
            # Without subscribers the rounds end here: a job in peace costs nothing.
            if not self._intervals and now >= self._kept_until:
                self._is_sampling = False
                return
            self._there.clear()
            interval = min(self._intervals.values(), default=_LEAST_INTERVAL)
            self._observers.at(now + interval, self._take)
            # Answers may come before ask() returns; the round is complete only after the last host was asked.
            self._is_asking = True
            self._observers.ask("samples", self._question, _WITHIN, self._heard)
            self._is_asking = False
            self._look_whether_complete()

    def _question(self, target: Target) -> Mapping[str, Any] | None:
        self._there[target.host] = target.last_output
        # A host that hangs would collect questions, and answer them all at once.
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
            sample = host_sample(answer.host, now, answer.value, last)
        with self._lock:
            self._open.discard(answer.host)
            if sample is None:
                self._problems[answer.host] = answer.problem or "its observer sent an invalid sample"
            else:
                self._newest[answer.host] = sample
                self._energy.add(sample)
                self._keep_energy(now)
                self._problems.pop(answer.host, None)
            self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        if self._open or self._is_asking:
            return
        self._complete_at = self._clock()
        calls, self._calls = self._calls, []
        # Calls run on the agenda's thread: this thread holds the lock, and may be a link's.
        for call in calls:
            self._observers.at(self._complete_at, call)


def _kept_energy(path: Path | None) -> Energy:
    with suppress(OSError, ValueError, TypeError):
        if path is not None:
            joules, seconds = json.loads(path.read_bytes())
            return Energy(float(joules), float(seconds))
    return Energy()


class _Once:
    """Makes a call once, on one thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
