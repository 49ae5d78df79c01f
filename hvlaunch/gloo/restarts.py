"""Whether a job goes on after a failure: its budget of restarts, and whether it gets anywhere at all. Pure."""

from collections import deque

from hvlaunch.job import ElasticOptions

__all__ = ["FRUITFUL", "FRUITLESS_IN_A_ROW", "Restarts"]

FRUITFUL = 15.0
"""Seconds after which a round counts as one that got somewhere, commits or not."""
FRUITLESS_IN_A_ROW = 5


class Restarts:
    """Failures that were made up for. Those older than --restart-window are forgotten; a static job makes up for none."""

    def __init__(self, options: ElasticOptions | None) -> None:
        self._limit = 0 if options is None else options.max_restarts
        self._window = 0.0 if options is None else options.restart_window
        self._failed: deque[float] = deque()
        self._fruitless = 0

    def failed(self, now: float, *, fruitful: bool | None) -> str | None:
        """A round failed, after it had got somewhere or not (None: that tells nothing). Why the job ends, if it does."""
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        self._failed.append(now)
        if fruitful is not None:
            self._fruitless = 0 if fruitful else self._fruitless + 1
        if self._limit is not None and len(self._failed) > self._limit:
            return f"all {self._limit} restarts are used up (--max-restarts)"
        if self._fruitless >= FRUITLESS_IN_A_ROW:
            return f"{self._fruitless} times in a row the workers failed before they got anywhere"
        return None
