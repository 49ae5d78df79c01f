"""A host, its workers and its GPUs at one moment, measured."""

from __future__ import annotations

import time

from hvlaunch.agent.observer.gpus import Gpus
from hvlaunch.agent.observer.machine import Machine
from hvlaunch.agent.observer.proc import allow_many_files
from hvlaunch.agent.observer.processes import Processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Tuple

__all__ = ["Samples"]

_FIRST = 0.2
"""Seconds from the first measurement, which has no rates, to the next."""
_LEAST = 0.05


class Samples:
    """All that has to be kept from one sample to the next."""

    def __init__(self) -> None:
        allow_many_files()
        self._processes = Processes()
        self._machine = Machine()
        self._gpus = Gpus()
        self._last: Optional[float] = None
        self._workers: List[Any] = []

    def take(self, workers: Sequence[Tuple[int, int]], paths: Dict[str, str]) -> Dict[str, Any]:
        """`workers` are pairs of rank and pid; of `paths`, by name, the free space is of interest."""
        now = time.monotonic()
        if self._last is None or self._workers != workers:
            self._measure(workers, paths, now)
            time.sleep(_FIRST)
            now = time.monotonic()
        return self._measure(workers, paths, now)

    def _measure(
        self, workers: Sequence[Tuple[int, int]], paths: Dict[str, str], now: float
    ) -> Dict[str, Any]:
        seconds = max(_LEAST, now - (self._last or 0.0))
        self._last, self._workers = now, list(workers)
        found = self._machine.sample(seconds, now, paths)
        problems = found["problems"]
        try:
            found["workers"] = self._processes.sample(workers, seconds)
        except OSError as error:
            found["workers"] = []
            problems.append("/proc: %s" % error.strerror)
        found["gpus"], problem = self._gpus.now(now)
        if problem:
            problems.append(problem)
        for worker in found["workers"]:
            worker["gpus"] = [
                gpu["index"]
                for gpu in found["gpus"]
                if any(self._processes.worker_of(pid) == worker["pid"] for pid in gpu["pids"])
            ]
        return found
