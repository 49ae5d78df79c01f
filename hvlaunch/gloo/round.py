"""One membership: its workers, who has left it, who has ended and how, and who failed first."""

from collections.abc import Mapping
from enum import Enum

from hvlaunch.gloo.restarts import FRUITFUL
from hvlaunch.gloo.seats import Seat
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import WorkerExit

__all__ = ["Round", "RoundState"]


class RoundState(Enum):
    RUNNING = "running"
    CHANGING = "its workers are to ask again at their next commit"
    BROKEN = "its workers are to leave it at once"


class Round:
    """The workers of a round. Times are seconds of the driver's clock."""

    def __init__(
        self, number: int, places: Mapping[Seat, Placement], now: float, *, commit: int = -1
    ) -> None:
        self.number = number
        self.places = places
        self.started_at = now
        self.state = RoundState.RUNNING
        self.cause = ""
        """Why it ended, or is to end."""
        self.culprit: str | None = None
        """The host whose failure ended it."""
        self.is_unknown = False
        """Whether what became of some of its workers will never be known."""
        self.leave_by: float | None = None
        """When all must have left it."""
        self.exits: dict[int, WorkerExit] = {}
        """By rank."""
        self.staying = set(places)
        """Whose workers have neither asked again nor ended."""
        self.hosts = list(dict.fromkeys(host for host, _ in places))
        """In order of rank."""
        self.commit_at = now
        self._first_commit = self.commit = commit
        self.follows_gain = False
        """Whether rounds got somewhere since the last failure, this one aside."""

    def add(self, end: WorkerExit) -> None:
        """Note how a worker of this round ended."""
        self.exits[end.rank] = end

    def committed(self, commit: int, now: float) -> None:
        """A worker has this commit."""
        if commit > self.commit:
            self.commit, self.commit_at = commit, now

    def is_fruitful(self, now: float) -> bool:
        """Whether it has got somewhere."""
        return self.commit > self._first_commit or now - self.started_at >= FRUITFUL

    @property
    def first_failure(self) -> WorkerExit | None:
        """By the time of its end, not by when the news came: hosts are at different distances."""
        failures = [end for end in self.exits.values() if not end.ok and not end.stopped]
        return min(failures, key=lambda end: (end.when, end.rank), default=None)
