"""Which workers hang: silent ones, those that do not leave a round that has ended, those that do not end. Pure."""

from collections.abc import Iterator
from math import inf

from hvlaunch.engine.events import HostAnswers, HostQuiet
from hvlaunch.engine.life import ENDING, State
from hvlaunch.engine.round import Round, RoundState
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.workers import Worker, Workers
from hvlaunch.job import ElasticOptions

__all__ = ["Health", "Hearing", "Overdue"]

_CHECKS_PER_TIMEOUT = 8
_END_CHECK = 5.0
_MARGIN = 2.0
"""Seconds, of who has not heard of an end: a host's silence is known of a little later than it begins."""
_STATIC_MARGIN = 15.0
_LATE = 1.0
"""Seconds after which a check that comes late means that this process was stopped itself."""


class Hearing:
    """Which hosts answer. `lease` is the silence in seconds after which a host is lost.

    As long as a host does not answer, the driver's link or the host's may be cut, and its words and its workers' can't come,
    nor can they hear ours: their time begins anew when it answers again.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._answers: dict[str, float] = {}
        """Since when each host has answered that once did not; for ever to come while it does not."""

    def hears(self, event: HostQuiet | HostAnswers, now: float) -> None:
        """A host does not answer, or does again."""
        self._answers[event.host] = inf if isinstance(event, HostQuiet) else now

    def hears_all(self, now: float) -> None:
        """Which hosts do not answer has to be found out anew."""
        self._answers = dict.fromkeys(self._answers, now)

    def until(self, worker: Worker, since: float, timeout: float, most: float) -> float:
        """Until when what the worker owes since then may come; `most` is for a host that answers, and does not, again and again."""
        answers = self._answers.get(worker.host, since)
        return min(max(since, answers) + timeout, since + self._lease + most)


class Health:
    """Watches the workers of an elastic job. What is found of one is found once, if it is told to end then."""

    def __init__(self, options: ElasticOptions, hearing: Hearing, rounds: Rounds) -> None:
        self._options = options
        self._hearing = hearing
        self._rounds = rounds
        self.next_check: float | None = None
        """When to look for silent workers, while there are rounds."""

    def beat(self, worker: Worker, commit: int, now: float, *, is_last: bool = False) -> float:
        """The worker lives; after its last beat nobody expects another. When to look after those that may not."""
        is_news = worker.beat(commit, None if is_last else now)
        current = self._rounds.round
        if is_news and current is not None and worker.round == current.number:
            current.committed(commit, now)
        if self.next_check is None:
            self.next_check = now + self._options.worker_timeout / _CHECKS_PER_TIMEOUT
        return self.next_check

    def silent(self, now: float) -> list[Worker]:
        """Those that were not heard of for --worker-timeout, and had been before.

        If all fell silent at once, and there are several, they have twice the time: it may be the driver, and nobody else has the state.
        """
        if self.next_check is None or now < self.next_check:
            return []
        beating = [
            worker for worker in self._rounds.workers if worker.beat_at is not None and not worker.is_ending
        ]
        late = now - self.next_check if now > self.next_check + _LATE else 0.0
        if late:
            for worker in beating:
                worker.beat(worker.commit, min(now, (worker.beat_at or 0.0) + late))
        timeout = self._options.worker_timeout
        more = timeout if late else 0.0  # what they sent meanwhile is still to be read
        self.next_check = now + timeout / _CHECKS_PER_TIMEOUT if beating else None
        newest = max((worker.beat_at or 0.0 for worker in beating), default=0.0)
        is_alone = len(beating) == 1
        return [
            worker for worker in beating if now > self._silent_by(worker, newest, is_alone=is_alone) + more
        ]

    def _silent_by(self, worker: Worker, newest: float, *, is_alone: bool) -> float:
        """When it will have been silent for too long; `newest` is the newest beat of all."""
        since, timeout = worker.beat_at or 0.0, self._options.worker_timeout
        are_all_silent = not is_alone and newest - since < timeout / 2
        return self._hearing.until(worker, since, timeout * (1 + are_all_silent), 2 * timeout)

    def is_without_commit(self, now: float) -> bool:
        """Whether the running round has gone on for --commit-timeout without one."""
        current, timeout = self._rounds.round, self._options.commit_timeout
        if timeout is None or current is None or not self._may_lack_commits(current):
            return False
        return now >= current.commit_at + timeout

    def _may_lack_commits(self, current: Round) -> bool:
        """Not where nobody is left in it: who waits for the next round, or is done, can't commit."""
        sees_commits = self._rounds.forming.sees_commits and current.state is not RoundState.BROKEN
        return sees_commits and not all(worker.is_done for worker in self._rounds.workers.working)

    def absent(self, now: float) -> list[Worker]:
        """Those of the round who have not met the others in time."""
        current = self._rounds.round
        if current is None or current.meet_by is None or now < current.meet_by:
            return []
        if now > current.meet_by + _LATE and not current.has_more_time:
            current.has_more_time = True
            current.meet_by = now + self._options.reset_timeout
        if now < current.meet_by or current.state is RoundState.BROKEN:
            return []
        absent = [worker for worker in self._rounds.workers.working if worker.rank not in current.met]
        if not absent:
            current.meet_by = None
        return absent

    def stragglers(self, now: float) -> list[Worker]:
        """Those that have not left the round in time."""
        current = self._rounds.round
        if current is None or current.leave_by is None or now < max(current.leave_by, current.excused_until):
            return []
        timeout = self._options.reset_timeout
        since = current.leave_by - timeout
        dues = {
            worker: self._hearing.until(worker, since, timeout, 2 * timeout)
            for worker in self._rounds.workers.working
        }
        current.excused_until = min((due for due in dues.values() if due > now), default=0.0)
        return [worker for worker, due in dues.items() if due <= now]

    def deadlines(self) -> Iterator[float]:
        """When to look for others than silent ones, while there are rounds."""
        current = self._rounds.round
        if current is not None:
            if current.leave_by is not None and self._rounds.workers.count(State.WORKING):
                yield max(current.leave_by, current.excused_until)
            if current.meet_by is not None and current.state is not RoundState.BROKEN:
                yield current.meet_by
            if self._options.commit_timeout is not None and self._may_lack_commits(current):
                yield current.commit_at + self._options.commit_timeout
        for worker in self._rounds.workers.draining:
            if worker.drain_until is not None:
                yield worker.drain_until


class Overdue:
    """Watches the workers that were told to end, of a job of any kind. A static job has more time: nothing waits for it."""

    def __init__(self, workers: Workers, hearing: Hearing, *, is_elastic: bool) -> None:
        self._workers = workers
        self._hearing = hearing
        self._margin = _MARGIN if is_elastic else _STATIC_MARGIN
        self._next_check: float | None = None

    def hosts(self, now: float) -> list[str]:
        """Those where workers do not end, whatever they are sent."""
        return sorted({worker.host for worker in self._workers.within(*ENDING) if now >= self._due(worker)})

    def _due(self, worker: Worker) -> float:
        """Until when its end may come."""
        ends_by = worker.orders.ends_by
        if ends_by is None:
            return inf
        return self._hearing.until(worker, ends_by, self._margin, self._margin)

    def deadline(self, now: float) -> float | None:
        """When to look again."""
        if not any(self._workers.count(state) for state in ENDING):
            self._next_check = None
        elif self._next_check is None or self._next_check <= now:
            self._next_check = now + _END_CHECK
        return self._next_check
