"""One round: its workers, who has left it, who has ended and how, who failed first; and whether another may follow. Pure."""

from collections import deque
from collections.abc import Sequence
from enum import Enum

from hvlaunch.engine.blame import cause_of
from hvlaunch.engine.causes import Cause, NoProgress, RestartsUsedUp, WorkerEnded
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import ElasticOptions, WorkerExit

__all__ = ["FRUITFUL", "FRUITLESS_IN_A_ROW", "Restarts", "Round", "RoundState"]

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

    def gained(self) -> None:
        """A round got somewhere, as is known now; or something was done about the last failure after all."""
        self._fruitless = 0

    def failed(self, now: float, *, fruitful: bool | None) -> RestartsUsedUp | NoProgress | None:
        """A round failed, after it had got somewhere or not (None: that tells nothing). Why the job ends, if it does."""
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        self._failed.append(now)
        if fruitful is not None:
            self._fruitless = 0 if fruitful else self._fruitless + 1
        if self._limit is not None and len(self._failed) > self._limit:
            return RestartsUsedUp(self._limit)
        if self._fruitless >= FRUITLESS_IN_A_ROW:
            return NoProgress(self._fruitless)
        return None


class RoundState(Enum):
    RUNNING = "running"
    CHANGING = "its workers are to ask again at their next commit"
    BROKEN = "its workers are to leave it at once"


class Round:
    """The workers of a round. Times are seconds of the driver's clock."""

    def __init__(self, number: int, launches: Sequence[Launch], now: float, *, commit: int = -1) -> None:
        self.number = number
        self.size = len(launches)
        self.started_at = now
        self.state = RoundState.RUNNING
        self.cause: Cause | None = None
        """Why it ended, or is to end."""
        self.broken_at: float | None = None
        self.culprit: str | None = None
        """The host whose failure ended it."""
        self.suspect: WorkerEnded | None = None
        """Whose failure ended it, if no other turns out to be the cause."""
        self.is_unexplained = False
        """Whether it failed, and no worker or host is known to be the cause."""
        self.is_unknown = False
        """Whether what became of some of its workers will never be known."""
        self.has_more_time = False
        """Whether it was looked too late who has met, so that they have as long again: what they sent was still to be read."""
        self.met: set[int] = set()
        """The ranks that have met the others."""
        self.exits: dict[int, WorkerExit] = {}
        """By rank."""
        self.started: set[int] = set()
        """The ranks that are known to have been started."""
        self.alone: dict[int, str] = {}
        """The ranks that never met others, and the library of each."""
        self.hosts = list(dict.fromkeys(launch.host for launch in launches))
        """In order of rank."""
        self._first_commit = self.commit = commit

    def add(self, end: WorkerExit) -> None:
        """Note how a worker of this round ended."""
        self.exits[end.rank] = end
        self.started.add(end.rank)

    def break_off(self, cause: Cause, now: float) -> None:
        """Its workers are to leave it at once."""
        self.state, self.cause, self.broken_at = RoundState.BROKEN, cause, now

    def has_met(self, rank: int) -> bool:
        """Note that the worker has met the others; True once all have."""
        self.met.add(rank)
        return len(self.met) == self.size

    def committed(self, commit: int) -> bool:
        """Note that a worker has this commit; True if it is the round's newest."""
        is_news = commit > self.commit
        self.commit = max(self.commit, commit)
        return is_news

    def is_fruitful(self, now: float) -> bool:
        """Whether it has got somewhere, as far as is known by now."""
        until = now if self.broken_at is None else self.broken_at
        return self.commit > self._first_commit or until - self.started_at >= FRUITFUL

    @property
    def never_started(self) -> tuple[int, ...]:
        """The ranks of whose start nothing was ever heard."""
        return tuple(rank for rank in range(self.size) if rank not in self.started)

    @property
    def failure(self) -> WorkerExit | None:
        """The worker that is the cause, if any has failed."""
        return cause_of(self.exits.values())
