"""A host, its workers and its GPUs at one moment, measured."""

from __future__ import annotations

import _thread
import os
import time

from hvlaunch.agent.observer.machine import Machine
from hvlaunch.agent.observer.proc import allow_many_files
from hvlaunch.agent.observer.processes import Processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

    Found = List[Dict[str, Any]]

__all__ = ["Gpus", "Samples"]


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


_WITHIN = 0.3
"""Seconds for one reading; what comes later is there at the next."""
_HANGS_AFTER = 5.0
_DEVICE = "/dev/nvidiactl"


class Gpus:
    """Asked in a thread of its own."""

    def __init__(self, is_there: Callable[[], bool] = lambda: os.path.exists(_DEVICE)) -> None:
        self._is_there = is_there
        self._read: Optional[Callable[[], Found]] = None
        self._found: Found = []
        self._problem: Optional[str] = None
        self._since: Optional[float] = None
        """When the reading began that is under way."""
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def now(self, now: float) -> Tuple[Found, Optional[str]]:
        """The newest figures, and why there are no others. `now` is time.monotonic()."""
        if self._since is None:
            if not self._is_there():
                return [], None
            self._since = now
            try:
                _thread.start_new_thread(self._look, ())
            except RuntimeError as error:
                self._since = None
                return [], "GPUs: %s" % error
        if self._done.acquire(timeout=_WITHIN):
            self._since = None
            return self._found, self._problem
        if time.monotonic() - self._since < _HANGS_AFTER:
            return self._found, self._problem
        return [], "the GPUs' driver has not answered for %d s" % (time.monotonic() - self._since)

    def _look(self) -> None:
        try:
            if self._read is None:
                self._read = _reader()
            self._found, self._problem = self._read(), None
        except Exception as error:  # noqa: BLE001 (a library's, a program's: whatever it is, it is told)
            self._found, self._problem = [], "GPUs: %s" % (error or type(error).__name__)
        self._done.release()


def _reader() -> Callable[[], Found]:
    """Raises NoGpus."""
    from hvlaunch.agent.observer.nvml import Library  # noqa: PLC0415 (only where there is a GPU)

    return Library().read
