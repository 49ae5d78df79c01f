"""Which workers hang: silent ones, those that do not leave a round that has ended, those that do not end. Pure."""

from collections.abc import Iterator

from hvlaunch.gloo.engine.life import ENDING, State
from hvlaunch.gloo.engine.round import Round, RoundState
from hvlaunch.gloo.engine.rounds import Rounds
from hvlaunch.gloo.engine.workers import Worker, Workers
from hvlaunch.job import ElasticOptions

__all__ = ["Health", "Overdue"]

_CHECKS_PER_TIMEOUT = 8
_END_CHECK = 5.0
_STATIC_MARGIN = 15.0
_LATE = 1.0
"""Seconds after which a check that comes late means that this process was stopped itself."""


class Health:
    """Watches the workers of an elastic job. What is found of one is found once, if it is told to end then."""

    def __init__(self, options: ElasticOptions, rounds: Rounds) -> None:
        self._options = options
        self._rounds = rounds
        self._next_check: float | None = None

    def beat(self, worker: Worker, commit: int, now: float, *, is_last: bool = False) -> float:
        """The worker lives; after its last beat nobody expects another. When to look after those that may not."""
        is_news = worker.beat(commit, None if is_last else now)
        current = self._rounds.round
        if is_news and current is not None and worker.round == current.number:
            current.committed(commit, now)
        if self._next_check is None:
            self._next_check = now + self._options.worker_timeout / _CHECKS_PER_TIMEOUT
        return self._next_check

    def silent(self, now: float) -> list[Worker]:
        """Those that were not heard of for --worker-timeout, and had been before."""
        if self._next_check is None or now < self._next_check:
            return []
        beating = [
            worker for worker in self._rounds.workers if worker.beat_at is not None and not worker.is_ending
        ]
        if now > self._next_check + _LATE:
            for worker in beating:
                worker.beat(worker.commit, now)  # what they sent meanwhile is still to be read
        timeout = self._options.worker_timeout
        self._next_check = now + timeout / _CHECKS_PER_TIMEOUT if beating else None
        return [worker for worker in beating if worker.beat_at is not None and now - worker.beat_at > timeout]

    def is_without_commit(self, now: float) -> bool:
        """Whether the running round has gone on for --commit-timeout without one."""
        current, timeout = self._rounds.round, self._options.commit_timeout
        if timeout is None or current is None or not self._may_lack_commits(current):
            return False
        return now >= current.commit_at + timeout

    def _may_lack_commits(self, current: Round) -> bool:
        """Not where nobody is left in it: who waits for the next round can't commit."""
        sees_commits = self._rounds.forming.sees_commits and current.state is not RoundState.BROKEN
        return sees_commits and self._rounds.workers.count(State.WORKING) > 0

    def absent(self, now: float) -> list[Worker]:
        """Those of the round who have not met the others in time."""
        current = self._rounds.round
        if current is None or current.meet_by is None or now < current.meet_by:
            return []
        if now > current.meet_by + _LATE:
            current.meet_by = (
                now + self._options.reset_timeout
            )  # what they sent meanwhile is still to be read
        if now < current.meet_by or current.state is RoundState.BROKEN:
            return []
        absent = [worker for worker in self._rounds.workers.working if worker.rank not in current.met]
        if not absent:
            current.meet_by = None
        return absent

    def stragglers(self, now: float) -> list[Worker]:
        """Those that have not left the round in time."""
        current = self._rounds.round
        if current is None or current.leave_by is None or now < current.leave_by:
            return []
        return self._rounds.workers.working

    def deadlines(self) -> Iterator[float]:
        """When to look again, while there are rounds."""
        if self._next_check is not None:
            yield self._next_check
        current = self._rounds.round
        if current is not None:
            if current.leave_by is not None and self._rounds.workers.count(State.WORKING):
                yield current.leave_by
            if current.meet_by is not None and current.state is not RoundState.BROKEN:
                yield current.meet_by
            if self._options.commit_timeout is not None and self._may_lack_commits(current):
                yield current.commit_at + self._options.commit_timeout
        for worker in self._rounds.workers.draining:
            if worker.drain_until is not None:
                yield worker.drain_until


class Overdue:
    """Watches the workers that were told to end, of a job of any kind. A static one has more time: nothing waits for it."""

    def __init__(self, workers: Workers, *, is_static: bool) -> None:
        self._workers = workers
        self._margin = _STATIC_MARGIN if is_static else 0.0
        self._next_check: float | None = None

    def hosts(self, now: float) -> list[str]:
        """Those where workers do not end, whatever they are sent."""
        ends = ((worker.host, worker.orders.ends_by) for worker in self._workers.within(*ENDING))
        return sorted({host for host, due in ends if due is not None and now >= due + self._margin})

    def deadline(self, now: float) -> float | None:
        """When to look again."""
        if not any(self._workers.count(state) for state in ENDING):
            self._next_check = None
        elif self._next_check is None or self._next_check <= now:
            self._next_check = now + _END_CHECK
        return self._next_check
