"""A job's state at a moment, and its totals so far, as data for other programs. docs/interfaces/control.md has the fields."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker
from hvlaunch.watch.rounds import Member, RoundBegin, RoundEnd, round_change

__all__ = ["BOUNDS", "Totals", "overview"]


def overview(
    engine: Engine, now: float, progress: Callable[[tuple[str, int, int]], Mapping[str, Any] | None]
) -> Mapping[str, Any]:
    """Return the engine's state at `now`, in seconds of the driver's clock. `progress` returns a worker's own report."""
    current = engine.round
    return {
        "phase": engine.phase.name.lower(),
        "round": None if current is None else _round(current, now),
        "workers": [
            _worker(worker, progress((worker.host, worker.slot, worker.start)))
            for worker in sorted(engine.workers, key=lambda worker: worker.rank)
        ],
        "hosts": [_host(host, now) for host in engine.pool],
        "hang": None if engine.hang is None else engine.hang._asdict(),
    }


def _round(current: Round, now: float) -> Mapping[str, Any]:
    return {
        "number": current.number,
        "size": current.size,
        "state": current.state.name.lower(),
        "elapsed": round(now - current.started_at, 3),
        "ended": sorted(current.exits),
    }


def _worker(worker: Worker, progress: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Describe a worker. Its commits count as steps if it reports no steps."""
    place = worker.launch.place
    if progress is None and worker.commit >= 0:
        progress = {"step": worker.commit, "total": None, "rate": None, "metrics": {}}
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "host": worker.host,
        "slot": worker.slot,
        "start": worker.start,
        "round": worker.round,
        "state": worker.state.name.lower(),
        "progress": progress,
        **({"role": worker.role} if worker.role else {}),
    }


def _host(host: PoolHost, now: float) -> Mapping[str, Any]:
    return {
        "host": host.name,
        "state": host.state.value,
        "is_listed": host.listed,
        "is_excluded": host.cooldown.holds(now),
    }


BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of recovery times, in seconds."""
_PLANNED = (
    causes.RankDone,
    causes.RoleDone,
    causes.TrainingDone,
    causes.NewTraining,
    causes.SlotGone,
    causes.WorkersToLeave,
    causes.MoreWorkers,
)
"""Causes of a round's end that are no failure."""


class Totals:
    """Running totals of a job. A watcher; times are seconds of the driver's clock.

    A successor that replays the same events computes the same totals.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._rounds = self._restarts = self._lost_hosts = 0
        self._recoveries = [0] * (len(BOUNDS) + 1)
        self._recovering = 0.0
        self._round = -1
        self._is_formed = True
        """True if workers of the round run after meeting the others; False if they run after their start."""
        self._members: frozenset[Member] = frozenset()
        self._missing: set[Member] = set()
        """Members not yet running."""
        self._failed_at: float | None = None
        """The time of the round's failure, until every worker runs again."""
        self._is_failed = self._is_planned = False
        """How the round has ended, or is to end."""
        self._useful = 0.0
        self._counted_to: float | None = None
        """The time up to which useful seconds are counted; None before every worker runs."""
        self._ran_to: float | None = None
        """The time from which some worker did not run; None before."""
        self._commit = -1
        """The newest commit; another training counts its commits anew."""
        self._has_commits = False

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Take note of an event at `now` and its actions."""
        if self._began_at is None:
            self._began_at = now
        match event:
            case on.WorkerStarted(host, _, slot, _, start) if not self._is_formed:
                self._run((host, slot, start), now)
            # A beat with the round's number comes from a worker that has met the others.
            case on.WorkerBeat(host, slot, start, commit):
                self._commit_at(commit, now)
                if event.round == self._round:
                    self._run((host, slot, start), now)
            case on.WorkerAsked():
                self._commit_at(event.commit, now)
            # A compacted run of idle turns has the newest commit only.
            case on.Lull():
                self._commit_at(event.commit, event.commit_at)
            case on.WorkerNotStarted() | on.WorkerExited() if event.code != 0:
                self._fail({(event.host, event.slot, event.start)}, now)
            case on.HostGone(host) | on.HostParting(host):
                self._lost_hosts += isinstance(event, on.HostGone)
                self._fail({member for member in self._members if member[0] == host}, now)
            case _:
                pass
        for action in actions:
            match round_change(action, actions):
                case RoundBegin() as begin:
                    self._begin(begin, now)
                case RoundEnd() as end:
                    self._end(end, now)
                case None:
                    pass

    def at(self, now: float) -> Mapping[str, Any]:
        """Return the totals at `now` as data; docs/interfaces/control.md has the fields."""
        running = self._useful
        if not self._has_commits and self._counted_to is not None:
            running += (now if self._ran_to is None else self._ran_to) - self._counted_to
        return {
            "seconds": 0.0 if self._began_at is None else now - self._began_at,
            "useful_seconds": running,
            "rounds": self._rounds,
            "restarts": self._restarts,
            "lost_hosts": self._lost_hosts,
            "recoveries": {"bounds": BOUNDS, "counts": self._recoveries, "seconds": self._recovering},
        }

    def _end(self, end: RoundEnd, now: float) -> None:
        self._is_planned = isinstance(end.cause, _PLANNED)
        if isinstance(end.cause, causes.NewTraining):
            self._commit = -1
        if not self._is_planned:
            self._fail(self._members, now)
        elif end.is_at_once:
            self._cease(now)

    def _begin(self, begin: RoundBegin, now: float) -> None:
        self._cease(now)
        self._count_remainder()
        self._rounds += begin.number > self._round
        # A planned end, such as a changed pool, is a new round and no restart.
        self._restarts += self._is_failed
        self._round, self._members, self._missing = begin.number, begin.members, set(begin.members)
        self._is_formed = begin.is_formed
        self._is_failed = self._is_planned = False

    def _run(self, member: Member, now: float) -> None:
        self._missing.discard(member)
        # Before the first round begins there are no members.
        if self._missing or not self._members or self._counted_to is not None or self._is_failed:
            return
        self._counted_to, self._ran_to = now, None
        if self._failed_at is not None:
            seconds = now - self._failed_at
            self._recoveries[bisect_left(BOUNDS, seconds)] += 1
            self._recovering += seconds
            self._failed_at = None

    def _fail(self, lost: Iterable[Member], now: float) -> None:
        """Note lost workers. A loss of members counts as the round's failure, unless the round was to end."""
        if self._is_planned or self._is_failed or self._members.isdisjoint(lost):
            return
        self._is_failed = True
        if self._failed_at is None:
            self._failed_at = now
        self._cease(now)

    def _cease(self, now: float) -> None:
        """Note the time from which some worker of the round does not run."""
        if self._counted_to is not None and self._ran_to is None:
            self._ran_to = now

    def _commit_at(self, commit: int, now: float) -> None:
        """Count the time up to a commit as useful."""
        # Work behind the newest commit may be lost, and counts only with the next commit.
        if commit <= self._commit:
            return
        self._commit, self._has_commits = commit, True
        if self._counted_to is not None:
            until = now if self._ran_to is None else min(now, self._ran_to)
            self._useful += max(0.0, until - self._counted_to)
            self._counted_to = until

    def _count_remainder(self) -> None:
        """Count the time of a round that is over, if workers never report commits."""
        if not self._has_commits and self._counted_to is not None and self._ran_to is not None:
            self._useful += self._ran_to - self._counted_to
        self._counted_to = None
