"""A job at one moment, as data for those who ask: its phase, its round, its workers and hosts. docs/control.md has the fields."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker

__all__ = ["BOUNDS", "Totals", "overview"]


def overview(
    engine: Engine, now: float, progress: Callable[[tuple[str, int, int]], Mapping[str, Any] | None]
) -> Mapping[str, Any]:
    """What the engine knows at `now`, in seconds of the driver's clock; `progress` is what a worker tells of its own."""
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
    """Of one that tells no steps, its commits are."""
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
    }


def _host(host: PoolHost, now: float) -> Mapping[str, Any]:
    return {
        "host": host.name,
        "state": host.state.value,
        "is_listed": host.listed,
        "is_excluded": host.cooldown.holds(now),
    }


BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of a recovery, for a histogram."""
_PLANNED = (
    causes.RankDone,
    causes.TrainingDone,
    causes.NewTraining,
    causes.SlotGone,
    causes.WorkersToLeave,
    causes.MoreWorkers,
)
"""Why a round ends without a failure."""

_Member = tuple[str, int, int]
"""A worker by host, slot and start."""


class Totals:
    """Sees all; times are seconds of the driver's clock. From the same events a successor comes to the same."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._rounds = self._restarts = self._lost_hosts = 0
        self._recoveries = [0] * (len(BOUNDS) + 1)
        self._recovering = 0.0
        self._round = -1
        self._is_for_started = False
        """Whether a worker of the round runs when it was started; else, when it has met the others."""
        self._members: set[_Member] = set()
        self._missing: set[_Member] = set()
        """Those of whom nobody knows yet that they run, or have met the others."""
        self._failed_at: float | None = None
        """When it began that not all workers of a round run, for a failure."""
        self._is_failed = self._is_planned = False
        """How the round has ended, or is to end."""
        self._useful = 0.0
        self._counted_to: float | None = None
        """While all workers run, and a moment longer: how far their time is counted."""
        self._ran_to: float | None = None
        """When they ceased to."""
        self._commit = -1
        """The newest; those of another training count anew."""
        self._has_commits = False

    def see(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """An event at `now`, and what the engine made of it."""
        if self._began_at is None:
            self._began_at = now
        match event:
            case on.WorkerStarted(host, _, slot, _, start) if self._is_for_started:
                self._runs((host, slot, start), now)
            case on.WorkerBeat(host, slot, start, commit):
                self._committed(commit, now)
                if event.round == self._round:
                    self._runs((host, slot, start), now)
            case on.WorkerAsked():
                self._committed(event.commit, now)
            case on.Lull():
                self._committed(event.commit, event.commit_at)
            case on.WorkerNotStarted() | on.WorkerExited() if event.code != 0:
                self._fails({(event.host, event.slot, event.start)}, now)
            case on.HostGone(host) | on.HostParting(host):
                self._lost_hosts += isinstance(event, on.HostGone)
                self._fails({member for member in self._members if member[0] == host}, now)
            case _:
                pass
        for action in actions:
            self._see_action(action, actions, now)

    def at(self, now: float) -> Mapping[str, Any]:
        """For programs; docs/control.md has the fields."""
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

    def _see_action(self, action: do.Action, actions: Sequence[do.Action], now: float) -> None:
        match action:
            case tell.RoundStarting(number):
                starts = [one for one in actions if isinstance(one, do.Start) and one.round == number]
                self._begin(
                    number, {(one.host, *launch[:2]) for one in starts for launch in one.launches}, now
                )
                self._is_for_started = True
            case tell.RoundFormed(number):
                launches = [one.launch for one in actions if isinstance(one, do.Assign)]
                self._begin(number, {(one.host, one.slot, one.start) for one in launches}, now)
                self._is_for_started = False
            case do.Break(_, cause) | do.Change(_, cause) | tell.RoundEnding(_, cause):
                self._is_planned = isinstance(cause, _PLANNED)
                if isinstance(cause, causes.NewTraining):
                    self._commit = -1
                if not self._is_planned:
                    self._fails(self._members, now)
                elif not isinstance(action, do.Change):  # its workers go on until their next commit
                    self._cease(now)
            case _:
                pass

    def _begin(self, number: int, members: set[_Member], now: float) -> None:
        self._cease(now)
        self._count_rest()
        self._rounds += number > self._round
        self._restarts += self._is_failed
        self._round, self._members, self._missing = number, members, set(members)
        self._is_failed = self._is_planned = False

    def _runs(self, member: _Member, now: float) -> None:
        self._missing.discard(member)
        if self._missing or not self._members or self._counted_to is not None or self._is_failed:
            return
        self._counted_to, self._ran_to = now, None
        if self._failed_at is not None:
            seconds = now - self._failed_at
            self._recoveries[bisect_left(BOUNDS, seconds)] += 1
            self._recovering += seconds
            self._failed_at = None

    def _fails(self, lost: set[_Member], now: float) -> None:
        """Workers of the round are lost that were not to end."""
        if self._is_planned or self._is_failed or not lost & self._members:
            return
        self._is_failed = True
        if self._failed_at is None:
            self._failed_at = now
        self._cease(now)

    def _cease(self, now: float) -> None:
        """Not all workers of the round run any more."""
        if self._counted_to is not None and self._ran_to is None:
            self._ran_to = now

    def _committed(self, commit: int, now: float) -> None:
        """What was done up to here is of use; what is done behind the newest commit may have been in vain."""
        if commit <= self._commit:
            return
        self._commit, self._has_commits = commit, True
        if self._counted_to is not None:
            until = now if self._ran_to is None else min(now, self._ran_to)
            self._useful += max(0.0, until - self._counted_to)
            self._counted_to = until

    def _count_rest(self) -> None:
        """The time of a round that is over, where workers never tell of commits."""
        if not self._has_commits and self._counted_to is not None and self._ran_to is not None:
            self._useful += self._ran_to - self._counted_to
        self._counted_to = None
