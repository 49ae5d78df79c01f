"""Watches over workers: silent workers, stragglers, survivors of signals, and workers without a slot. Pure."""

from math import inf

from hvlaunch.engine import causes as why
from hvlaunch.engine.actions import Action
from hvlaunch.engine.events import HostAnswers, HostQuiet
from hvlaunch.engine.hosts import Pool
from hvlaunch.engine.round import RoundState
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.engine.workers import ENDING, Worker, Workers, WorkerState, gently
from hvlaunch.job import ElasticOptions, JobSpec

__all__ = ["Draining", "Health", "Hearing", "Overdue"]

_CHECKS_PER_TIMEOUT = 8
_END_CHECK = 5.0
_MARGIN = 2.0
"""Seconds after which the driver knows of a host's silence, which delays news of a worker's end."""
_STATIC_MARGIN = 15.0
_LATE = 1.0
"""Delay in seconds that proves a stop of this process itself."""


class Hearing:
    """Knows the silent hosts. `lease` is the silence in seconds after which a host is lost.

    While a host does not answer, either network link may be cut. Neither its workers' messages nor ours arrive, so their
    time begins anew when the host answers again.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._answers: dict[str, float] = {}
        """Start of a silent host's new answers; infinite during the silence."""

    def hears(self, event: HostQuiet | HostAnswers, now: float) -> None:
        """Note that a host does not answer, or answers again."""
        # An infinite time makes every wait for the host's workers last until the bound.
        self._answers[event.host] = inf if isinstance(event, HostQuiet) else now

    def hears_all(self, now: float) -> None:
        """Reset the silence of hosts after a stop of the driver."""
        self._answers = dict.fromkeys(self._answers, now)

    def until(self, worker: Worker, since: float, timeout: float, most: float) -> float:
        """Return how long a worker's answer may take; `most` bounds the time on a host that answers only now and then."""
        answers = self._answers.get(worker.host, since)
        return min(max(since, answers) + timeout, since + self._lease + most)


class Health:
    """Watches the workers of an elastic job. Each finding is reported once if the worker is stopped for it."""

    def __init__(self, options: ElasticOptions, hearing: Hearing, rounds: Rounds, waits: Waits) -> None:
        self._waits = waits
        self._options = options
        self._hearing = hearing
        self._rounds = rounds

    def beat(self, worker: Worker, commit: int, now: float, *, is_last: bool = False) -> float:
        """Note a worker's heartbeat; its last one ends the watch. Returns the time of the next look for silence."""
        is_news = worker.beat(commit, None if is_last else now)
        current = self._rounds.round
        is_member = current is not None and worker.round == current.number
        if is_news and is_member and current is not None and current.committed(commit):
            self._waits.begin(Wait.COMMIT, None, now, self._options.commit_timeout or inf)
        look = self._waits.until(Wait.SILENCE_LOOK)
        if look is None:
            look = now + self._options.worker_timeout / _CHECKS_PER_TIMEOUT
            self._waits.begin(Wait.SILENCE_LOOK, None, look)
        return look

    def silent(self, now: float) -> list[Worker]:
        """Return workers that beat before, and are silent for --worker-timeout.

        If several workers fell silent at the same time, they get twice the time: the driver itself may be the reason, and
        they may be the only ones with the state.
        """
        look = self._waits.until(Wait.SILENCE_LOOK)
        if look is None or now < look:
            return []
        beating = [
            worker for worker in self._rounds.workers if worker.beat_at is not None and not worker.is_ending
        ]
        # The driver itself was stopped: silence until now proves nothing.
        late = now - look if now > look + _LATE else 0.0
        if late:
            for worker in beating:
                worker.beat(worker.commit, min(now, (worker.beat_at or 0.0) + late))
        timeout = self._options.worker_timeout
        # Messages sent meanwhile are still unread.
        more = timeout if late else 0.0  # what they sent meanwhile is still to be read
        if beating:
            self._waits.begin(Wait.SILENCE_LOOK, None, now + timeout / _CHECKS_PER_TIMEOUT)
        else:
            self._waits.end(Wait.SILENCE_LOOK)
        newest = max((worker.beat_at or 0.0 for worker in beating), default=0.0)
        is_alone = len(beating) == 1
        return [
            worker for worker in beating if now > self._silent_by(worker, newest, is_alone=is_alone) + more
        ]

    def _silent_by(self, worker: Worker, newest: float, *, is_alone: bool) -> float:
        """Return when the worker's silence is too long; `newest` is the newest beat of all."""
        since, timeout = worker.beat_at or 0.0, self._options.worker_timeout
        # A single worker has no others to compare with.
        are_all_silent = not is_alone and newest - since < timeout / 2
        return self._hearing.until(worker, since, timeout * (1 + are_all_silent), 2 * timeout)

    def is_without_commit(self, now: float) -> bool:
        """True if the running round has lasted for --commit-timeout without a commit."""
        return self._waits.is_over(Wait.COMMIT, now) and self.may_lack_commits

    @property
    def may_lack_commits(self) -> bool:
        """True while a member of the round can still commit."""
        current = self._rounds.round
        if current is None or self._options.commit_timeout is None:
            return False
        sees_commits = self._rounds.forming.sees_commits and current.state is not RoundState.BROKEN
        return sees_commits and not all(worker.is_done for worker in self._rounds.workers.working)

    def absent(self, now: float) -> list[Worker]:
        """Return members of the round that have not met the others in time."""
        current = self._rounds.round
        until = self._waits.until(Wait.MEETING)
        if current is None or until is None or now < until:
            return []
        # As above; but only once, so that the wait has a bound.
        if now > until + _LATE and current.give_more_time():
            self._waits.begin(Wait.MEETING, None, now + self._options.reset_timeout)
            return []
        if current.state is RoundState.BROKEN:
            return []
        absent = [worker for worker in self._rounds.workers.working if worker.rank not in current.met]
        if not absent:
            self._waits.end(Wait.MEETING)
        return absent

    def stragglers(self, now: float) -> list[Worker]:
        """Return workers that have not left the round in time."""
        leave_by = self._waits.until(Wait.LEAVING)
        if leave_by is None or now < max(leave_by, self._waits.until(Wait.LEAVING_UNHEARD) or 0.0):
            return []
        timeout = self._options.reset_timeout
        # The round ended then.
        since = leave_by - timeout
        dues = {
            worker: self._hearing.until(worker, since, timeout, 2 * timeout)
            for worker in self._rounds.workers.working
        }
        unheard = min((due for due in dues.values() if due > now), default=None)
        if unheard is None:
            self._waits.end(Wait.LEAVING_UNHEARD)
        else:
            self._waits.begin(Wait.LEAVING_UNHEARD, None, unheard)
        return [worker for worker, due in dues.items() if due <= now]


class Overdue:
    """Watches stopped workers in any job. A static job has more time, since no round waits for them."""

    def __init__(self, workers: Workers, hearing: Hearing, waits: Waits, *, is_elastic: bool) -> None:
        self._waits = waits
        self._workers = workers
        self._hearing = hearing
        self._margin = _MARGIN if is_elastic else _STATIC_MARGIN

    def hosts(self, now: float) -> list[str]:
        """Return hosts with workers that do not end, whatever they are sent."""
        return sorted({worker.host for worker in self._workers.within(*ENDING) if now >= self._due(worker)})

    def _due(self, worker: Worker) -> float:
        """Return the time by which the news of the worker's end must come."""
        ends_by = self._waits.until(Wait.ENDING, worker)
        if ends_by is None:
            return inf
        return self._hearing.until(worker, ends_by, self._margin, self._margin)

    def plan_look(self, now: float) -> None:
        """Set the next look, as long as workers are to end."""
        if not self._waits.all_of(Wait.ENDING):
            self._waits.end(Wait.ENDING_LOOK)
        elif (self._waits.until(Wait.ENDING_LOOK) or now) <= now:
            self._waits.begin(Wait.ENDING_LOOK, None, now + _END_CHECK)


class Draining:
    """Lets workers without a slot reach their next commit, and stops them after --drain-timeout."""

    def __init__(self, spec: JobSpec, pool: Pool, rounds: Rounds, waits: Waits) -> None:
        self._waits = waits
        self._grace = spec.grace
        self._elastic = spec.elastic
        self._pool = pool
        self._rounds = rounds
        self._workers = rounds.workers

    def go_on(self, now: float) -> list[Action]:
        """Drain workers whose slot is gone; workers whose slot is back may stay."""
        if self._elastic is None:
            return []
        actions: list[Action] = []
        for worker in list(self._workers):
            if worker.is_ending or self._pool.has_slot(worker.seat, now):
                self._waits.end(Wait.DRAINING, worker)
                continue
            # The time limit counts from the first turn without the slot.
            if not self._waits.has(Wait.DRAINING, worker):
                self._waits.begin(Wait.DRAINING, worker, now + self._elastic.drain_timeout)
            is_due = self._waits.is_over(Wait.DRAINING, now, worker)
            actions += self._drain(worker, now, is_due=is_due)
        return actions

    def _drain(self, worker: Worker, now: float, *, is_due: bool) -> list[Action]:
        """Stop the worker if no work is lost by it, or its time is over."""
        cause = why.SlotGone(worker.host)
        # A waiting worker loses no work, but others may need its state.
        if worker.state is WorkerState.WAITING:
            if not (is_due or not worker.has_state or self._has_survivors(now)):
                return []
            self._rounds.changed()
            return [*self._workers.dismiss([worker], cause, self._grace, now)]
        is_member = self._rounds.is_member(worker)
        if is_member and not is_due:
            return []
        actions = self._rounds.break_off(cause, now) if is_member else []
        if not worker.is_ending:
            actions += self._workers.stop([worker], gently(self._grace), now)
        return actions

    def _has_survivors(self, now: float) -> bool:
        """True if a remaining worker has the state for new workers."""
        return any(
            worker.has_state and self._pool.has_slot(worker.seat, now) for worker in self._workers.living
        )
