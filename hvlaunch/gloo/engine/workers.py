"""The workers that live, whether they are in a round or not, and how they are ended. Pure."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hvlaunch.gloo.engine.actions import Step
from hvlaunch.gloo.engine.cooldown import Cooldown
from hvlaunch.gloo.engine.events import WorkerExited, WorkerNotStarted
from hvlaunch.hosts.placement import Seat
from hvlaunch.job import WorkerExit

__all__ = ["AT_ONCE", "Worker", "Workers", "gently", "passing_on"]

AT_ONCE = [Step(signal.SIGKILL, 0.0)]


def gently(grace: float, after: float = 0.0) -> list[Step]:
    """SIGTERM, and SIGKILL when the grace is over."""
    return [Step(signal.SIGTERM, after), Step(signal.SIGKILL, after + grace)]


def passing_on(interrupt: int, grace: float) -> list[Step]:
    """The same after an interrupt: SIGINT is tried first, for half of the grace, where it was that."""
    if interrupt != signal.SIGINT:
        return gently(grace)
    return [Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, grace / 2), Step(signal.SIGKILL, grace)]


_PATIENCE = 10.0
"""Seconds after the last signal in which a worker must have ended."""


class Worker:
    """A process of the user's command. Times are seconds of the driver's clock."""

    def __init__(self, seat: Seat, start: int, born: int, rank: int, now: float) -> None:
        self.seat = seat
        self.host, self.slot = seat
        self.start = start
        """How many workers its slot had before it."""
        self.born = born
        """The round that it was started for."""
        self.born_at = now
        self.rank = rank
        self.round: int | None = None
        """The round that it is in."""
        self.last_round = -1
        """The last that it was in, as it says."""
        self.commit = -1
        self.is_waiting = False
        self.beat_at: float | None = None
        self.drain_until: float | None = None
        self.is_leaving = False
        self.has_failed = False
        """Whether its end is a failure though we caused it."""
        self.is_agents = False
        """Whether its agent stops it on its own account, and began with that before we heard of it."""
        self.ends_by: float | None = None
        self._stopped_at: float | None = None
        self._stop_signals: set[int] = set()
        self._killed_at: float | None = None
        """When it was, or is, to be sent SIGKILL."""

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end."""
        return self._stopped_at is not None

    @property
    def has_state(self) -> bool:
        """Whether it was in a round."""
        return self.last_round >= 0

    def stop(self, steps: Sequence[Step], now: float) -> None:
        """Note that it was told to end."""
        first, last = now + steps[0].after, now + steps[-1].after
        self._stopped_at = first if self._stopped_at is None else min(self._stopped_at, first)
        self._stop_signals.update(step.signal for step in steps)
        kills = [now + step.after for step in steps if step.signal == signal.SIGKILL]
        self._killed_at = min((at for at in (self._killed_at, *kills) if at is not None), default=None)
        self.ends_by = last + _PATIENCE

    def ended(self, event: WorkerExited | WorkerNotStarted, since: float, now: float) -> WorkerExit:
        """How it ended, counted from `since`."""
        if isinstance(event, WorkerNotStarted):
            return WorkerExit(
                rank=self.rank, host=self.host, code=event.code, when=now - since, not_started=event.cause
            )
        return WorkerExit(
            rank=self.rank,
            host=self.host,
            code=event.code,
            signal=event.signal,
            when=max(0.0, event.at - since),
            max_rss=event.max_rss,
            oom_killed=event.oom_killed,
            stopped=self._was_stopped(event),
            error_file=event.error_file,
        )

    def _was_stopped(self, event: WorkerExited) -> bool:
        """Ended because we said so: after our signals, by one of them, or well. A SIGKILL before ours was another's."""
        if self.has_failed:
            return False
        if self.is_leaving and event.code == 0:
            return True
        if self._stopped_at is None:
            return False
        is_ours = self.is_agents or (self._killed_at is not None and event.at >= self._killed_at)
        asked = self._stop_signals - {signal.SIGKILL} | ({signal.SIGKILL} if is_ours else set())
        by_signal = event.signal in asked or (event.code or 0) - 128 in asked
        if event.at < self._stopped_at:
            return self.is_agents and by_signal
        return by_signal or event.code == 0


class Workers:
    """All living workers, by host and slot: one in a slot at a time."""

    def __init__(self) -> None:
        self._live: dict[str, dict[int, Worker]] = {}
        self._started: Counter[Seat] = Counter()
        self.size = 0
        self.starting: set[Seat] = set()
        """Those that have no place and have not asked for one."""
        self.ending: set[Worker] = set()
        """Those that were told to end."""
        self.draining: set[Worker] = set()
        """Those that are to leave at their next commit."""
        self.cooldowns: dict[Seat, Cooldown] = {}

    def __iter__(self) -> Iterator[Worker]:
        for workers in self._live.values():
            yield from workers.values()

    def on(self, host: str) -> list[Worker]:
        return list(self._live.get(host, {}).values())

    def at(self, seat: Seat) -> Worker | None:
        return self._live.get(seat[0], {}).get(seat[1])

    def of(self, seats: Iterable[Seat]) -> list[Worker]:
        """Those that live in these seats, in their order."""
        return [worker for seat in seats if (worker := self.at(seat)) is not None]

    @property
    def hosts(self) -> list[str]:
        """Where workers live."""
        return [host for host, workers in self._live.items() if workers]

    @property
    def waiting(self) -> list[Worker]:
        """Those that have asked for a place, and were not told to end."""
        return [worker for worker in self if worker.is_waiting and not worker.is_ending]

    def launch(self, seat: Seat, *, born: int, rank: int, now: float) -> Worker:
        worker = Worker(seat, self._started[seat], born, rank, now)
        self._started[seat] += 1
        self._live.setdefault(worker.host, {})[worker.slot] = worker
        self.size += 1
        return worker

    def find(self, seat: Seat, start: int) -> Worker | None:
        """The worker, if it still lives."""
        worker = self.at(seat)
        return worker if worker is not None and worker.start == start else None

    def stop(self, worker: Worker, steps: Sequence[Step], now: float) -> None:
        """Note that the worker was told to end."""
        worker.stop(steps, now)
        self.ending.add(worker)
        self.starting.discard(worker.seat)
        self.draining.discard(worker)

    def drain(self, worker: Worker, until: float | None) -> None:
        """Let the worker leave at its next commit, or then at the latest; None: it may stay."""
        worker.drain_until = until
        if until is None:
            self.draining.discard(worker)
        else:
            self.draining.add(worker)

    def end(self, worker: Worker) -> None:
        """The worker is no more."""
        del self._live[worker.host][worker.slot]
        self.starting.discard(worker.seat)
        self.ending.discard(worker)
        self.draining.discard(worker)
        self.size -= 1

    def forget_waits(self, host: str, now: float) -> None:
        """The host as a whole is excluded: when that is over, its slots wait no longer for reasons of their own."""
        for (name, _), cooldown in self.cooldowns.items():
            if name == host:
                cooldown.cut_short(now)

    def lose(self, host: str) -> list[Worker]:
        """The host is gone, and these workers with it."""
        lost = self.on(host)
        for worker in lost:
            self.end(worker)
        return lost
