"""Samples: the figures of a host, its workers and its GPUs at one moment."""

from __future__ import annotations

import _thread
import errno
import os
import time

from hvlaunch.agent.errands.observer.machine import Machine
from hvlaunch.agent.errands.observer.processes import Processes
from hvlaunch.agent.proc import allow_many_files
from hvlaunch.agent.quick import has_own_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

    Found = List[Dict[str, Any]]

__all__ = ["Gpus", "Samples"]


_FIRST = 0.2
"""Seconds from the first measurement, which gives no rates, to the second."""
_LEAST = 0.05


class Samples:
    """Takes samples; keeps the figures that the next sample needs for its rates."""

    def __init__(self) -> None:
        allow_many_files()
        self._processes = Processes()
        self._machine = Machine()
        self._gpus = Gpus()
        self._last: Optional[float] = None
        self._workers: List[Any] = []

    def take(self, workers: Sequence[Tuple[int, int]], paths: Dict[str, str]) -> Dict[str, Any]:
        """Take a sample. `workers` are pairs of rank and pid; `paths` are the places, by name, to find the free space of."""
        now = time.monotonic()
        # Rates need two measurements of the same workers.
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
        sample = self._machine.sample(seconds, now, paths)
        problems = sample["problems"]
        sample["commits"] = _memory_of_commits(paths.get("scratch", ""))
        try:
            if not has_own_proc():
                raise FileNotFoundError(errno.ENOENT, "it shows another PID namespace")
            sample["workers"] = self._processes.sample(workers, seconds)
        except OSError as error:
            sample["workers"] = []
            problems.append("/proc: %s" % error.strerror)
        sample["gpus"], problem = self._gpus.now(now)
        if problem:
            problems.append(problem)
        for worker in sample["workers"]:
            worker["gpus"] = [
                gpu["index"]
                for gpu in sample["gpus"]
                if any(self._processes.worker_of(pid) == worker["pid"] for pid in gpu["pids"])
            ]
        return sample


def _memory_of_commits(scratch: str) -> int:
    """Return the bytes of the workers' commits and of copies; agent/commits/__init__.py has the places of their files."""
    # Not imported: this errand runs in most jobs that are watched, and few of them have commits.
    directory = "/dev/shm/%s.kept" % os.path.basename(scratch)  # noqa: S108 (as there)
    size = 0
    for folder in (directory, directory + "/copies"):
        try:
            with os.scandir(folder) as entries:
                size += sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        except OSError:  # noqa: PERF203 (there are two)
            continue
    return size


_WITHIN = 0.3
"""Seconds to wait for a reading; a later result counts for the next sample."""
_HANGS_AFTER = 5.0
_DEVICE = "/dev/nvidiactl"


class Gpus:
    """The GPUs' figures, read in a thread of their own since the driver's library may hang."""

    def __init__(self, is_there: Callable[[], bool] = lambda: os.path.exists(_DEVICE)) -> None:
        self._is_there = is_there
        self._read: Optional[Callable[[], Found]] = None
        self._found: Found = []
        self._problem: Optional[str] = None
        self._since: Optional[float] = None
        """Start of the current reading."""
        self._done = _thread.allocate_lock()
        # Locked: the reading releases it at its end.
        self._done.acquire()

    def now(self, now: float) -> Tuple[Found, Optional[str]]:
        """Return the newest figures, and the problem if there are none. `now` is time.monotonic()."""
        if self._since is None:
            if not self._is_there():
                return [], None
            self._since = now
            try:
                _thread.start_new_thread(self._look, ())
            except RuntimeError as error:
                self._since = None
                return [], "GPUs: %s" % error
        # A quick library answers within the sample; a slow one never holds it up.
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
    """Load NVML. Raises NoGpus."""
    from hvlaunch.agent.errands.observer.nvml import Library  # noqa: PLC0415 (only where there is a GPU)

    return Library().read
