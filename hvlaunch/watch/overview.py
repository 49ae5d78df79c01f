"""A job's state at a moment, and its totals so far, as data for other programs. docs/interfaces/control.md has the fields."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.hosts import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.workers import Worker
from hvlaunch.watch.rounds import Member, RoundBegin, RoundEnd, round_change

__all__ = ["BOUNDS", "PARTS", "Totals", "overview"]


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
        "slow": host.slow or None,
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
PARTS = ("start", "training", "lost", "recovery", "hung", "end")
"""Parts of a job's time. Their sum is the whole time."""


class _Clock:
    """Splits the time of a job into PARTS."""

    def __init__(self) -> None:
        self.part = "start"
        self.has_commits = False
        self._part_before = "start"
        """The part before the hang."""
        self._since = 0.0
        """The time from which the current part counts."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._pending = 0.0
        """Seconds of training that a failure may still make lost."""
        self._useful = 0.0

    def begin(self, now: float) -> None:
        self._since = now

    def at(self, now: float) -> tuple[Mapping[str, float], float]:
        """Return the parts and the useful seconds at `now`."""
        current = max(0.0, now - self._since)
        # Sums of differences may be a little below zero.
        parts = {name: max(0.0, seconds) for name, seconds in self._parts.items()}
        parts[self.part] += current
        pending = self._pending + (current if self.part == "training" else 0.0)
        # A counter for Prometheus: a late report of a hang must not lower the number.
        self._useful = max(self._useful, parts["training"] - (pending if self.has_commits else 0.0))
        return parts, self._useful

    def enter(self, part: str, now: float) -> float:
        """Begin a part; return the seconds of the part before, since the last call."""
        seconds = max(0.0, now - self._since)
        self._parts[self.part] += seconds
        if self.part == "training":
            self._pending += seconds
        # The end of a job is its last part.
        self.part = self.part if self.part == "end" else part
        self._since = max(now, self._since)
        return seconds

    def cease(self, now: float) -> None:
        """Some worker of the round does not run from `now` on."""
        if self.part in ("training", "hung"):
            self.enter("recovery", now)

    def hang(self, seconds: float, now: float) -> None:
        """Count the time without progress as hung."""
        if self.part in ("hung", "end"):
            return
        part = self._part_before = self.part
        silent = min(seconds, self.enter("hung", now))
        self._parts[part] -= silent
        self._parts["hung"] += silent
        if part == "training":
            self._pending -= silent

    def continue_after_hang(self, now: float) -> None:
        if self.part == "hung":
            self.enter(self._part_before, now)

    def commit(self, now: float) -> None:
        """Count the time up to a commit as useful."""
        self.has_commits = True
        if self.part == "training":
            self.enter("training", now)
        self.settle(is_lost=False)

    def step(self, now: float, part: str) -> None:
        """Count the time before the round's first new step as `part`: a start, or a repetition of lost steps."""
        if not self.has_commits and self.part == "training":
            self.enter("training", now)
            self._parts["training"] -= self._pending
            self._parts[part] += self._pending
            self._pending = 0.0

    def settle(self, *, is_lost: bool) -> None:
        """Decide if the work of the pending time is kept or lost."""
        if is_lost and self.has_commits:
            self._parts["training"] -= self._pending
            self._parts["lost"] += self._pending
        self._pending = 0.0

    def finish(self, now: float, *, is_good: bool) -> None:
        """End the job. Time after a round without a successor was no recovery, but the job's end."""
        if self.part == "recovery":
            self.part = "end"
        self.enter("end", now)
        self.settle(is_lost=not is_good)


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
        self._done: set[Member] = set()
        """Members with exit code 0."""
        self._failed_at: float | None = None
        """The time of the round's failure, until every worker runs again."""
        self._is_failed = self._is_planned = False
        """How the round has ended, or is to end."""
        self._clock = _Clock()
        self._has_run = False
        """True once all workers of the round ran."""
        self._stepped = -1
        """The newest round with a new step."""
        self._commit = -1
        """The newest commit; another training counts its commits anew."""
        self._held: dict[tuple[str, int], float] = {}
        """Seconds for which a host had this number of workers, in the rounds before this one."""
        self._held_since = 0.0

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Take note of an event at `now` and its actions."""
        if self._began_at is None:
            self._began_at = now
            self._clock.begin(now)
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
            case on.StepReached(number) if number == self._round > self._stepped:
                self._stepped = number
                self._clock.step(now, "start" if self._rounds == 1 else "recovery")
            # A compacted run of idle turns has the newest commit only.
            case on.Lull():
                self._commit_at(event.commit, event.commit_at)
            case on.WorkerNotStarted() | on.WorkerExited() if event.code != 0:
                self._fail({(event.host, event.slot, event.start)}, now)
            case on.WorkerExited():
                self._done.add((event.host, event.slot, event.start))
                if self._members and self._members <= self._done:
                    self._clock.cease(now)
            case on.HostGone(host) | on.HostParting(host):
                self._lost_hosts += isinstance(event, on.HostGone)
                self._fail({member for member in self._members if member[0] == host}, now)
            case on.JobHangs():
                self._clock.hang(event.seconds, now)
            case on.JobGoesOn():
                self._clock.continue_after_hang(now)
            case on.Interrupted():
                self._clock.enter("end", now)
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
            if isinstance(action, do.Finish):
                self._clock.finish(now, is_good=action.result.exit_code == 0)

    def at(self, now: float) -> Mapping[str, Any]:
        """Return the totals at `now` as data; docs/interfaces/control.md has the fields."""
        began = now if self._began_at is None else self._began_at
        parts, useful = (
            self._clock.at(now) if self._began_at is not None else (dict.fromkeys(PARTS, 0.0), 0.0)
        )
        return {
            "seconds": now - began,
            "useful_seconds": useful,
            "parts": parts,
            "has_steps": self._stepped >= 0 or self._clock.has_commits,
            "workers": [
                {"host": host, "workers": workers, "seconds": seconds}
                for (host, workers), seconds in sorted(self._held_at(now).items())
            ],
            "rounds": self._rounds,
            "restarts": self._restarts,
            # The failure of the present round has no restart yet.
            "failures": self._restarts + self._is_failed,
            "lost_hosts": self._lost_hosts,
            "recoveries": {"bounds": BOUNDS, "counts": self._recoveries, "seconds": self._recovering},
        }

    def _held_at(self, now: float) -> dict[tuple[str, int], float]:
        """Return for how long each host had which number of workers, from their start on."""
        held = dict(self._held)
        for entry in Counter(host for host, _, _ in self._members).items():
            held[entry] = held.get(entry, 0.0) + max(0.0, now - self._held_since)
        return held

    def _end(self, end: RoundEnd, now: float) -> None:
        self._is_planned = isinstance(end.cause, _PLANNED)
        if isinstance(end.cause, causes.NewTraining):
            self._commit = -1
        if not self._is_planned:
            self._fail(self._members, now)
        elif end.is_at_once:
            self._clock.cease(now)

    def _begin(self, begin: RoundBegin, now: float) -> None:
        self._clock.cease(now)
        self._clock.settle(is_lost=not self._is_planned)
        # A job that can't form a round again ends: its wait for the round is no part of its end.
        if self._clock.part == "recovery":
            self._clock.enter("recovery", now)
        self._held, self._held_since = self._held_at(now), now
        self._rounds += begin.number > self._round
        # A planned end, such as a changed pool, is a new round and no restart.
        self._restarts += self._is_failed
        self._round, self._members, self._missing = begin.number, begin.members, set(begin.members)
        self._is_formed = begin.is_formed
        self._is_failed = self._is_planned = self._has_run = False

    def _run(self, member: Member, now: float) -> None:
        self._missing.discard(member)
        # Before the first round begins there are no members.
        if self._missing or not self._members or self._has_run or self._is_failed:
            return
        self._has_run = True
        self._clock.enter("training", now)
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
        self._clock.enter("recovery", now)

    def _commit_at(self, commit: int, now: float) -> None:
        # Work behind the newest commit may be lost, and counts only with the next commit.
        if commit > self._commit:
            self._commit = commit
            self._clock.commit(now)
