"""One membership: its workers, who has ended and how, and who failed first."""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hvlaunch.gloo.actions import Step
from hvlaunch.gloo.events import WorkerExited, WorkerNotStarted
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import WorkerExit

__all__ = ["Round"]


@dataclass(slots=True)
class Round:
    """The workers of a round. `started_at` and `stopped_at` are seconds of the driver's clock."""

    number: int
    places: Sequence[Placement]
    started_at: float
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    """By rank."""
    stopped_at: float | None = None
    stop_signals: set[int] = field(default_factory=set)
    by_host: dict[str, list[Placement]] = field(init=False)
    """The places of each host in use; all in order of rank."""
    _live: set[int] = field(init=False)
    """Ranks of the workers that are left."""

    def __post_init__(self) -> None:
        self.by_host = {}
        for place in self.places:
            self.by_host.setdefault(place.host, []).append(place)
        self._live = {place.rank for place in self.places}

    @property
    def is_over(self) -> bool:
        """Whether no worker is left: each has ended, or went with its host."""
        return not self._live

    def lose(self, host: str) -> None:
        """Note that the host is gone, and its workers with it."""
        self._live.difference_update(place.rank for place in self.by_host.get(host, ()))

    def stop(self, steps: Iterable[Step], now: float) -> None:
        """Note that the workers were told to end."""
        self.stopped_at = now if self.stopped_at is None else self.stopped_at
        self.stop_signals.update(step.signal for step in steps)

    def add(self, event: WorkerExited | WorkerNotStarted, now: float) -> WorkerExit | None:
        """Record a worker's end; None where it belongs to no worker of this round that was still there."""
        place = self._place(event.host, event.slot)
        if event.round != self.number or place is None or place.rank in self.exits:
            return None
        if isinstance(event, WorkerNotStarted):
            end = WorkerExit(
                rank=place.rank,
                host=place.host,
                code=event.code,
                when=now - self.started_at,
                not_started=event.cause,
            )
        else:
            end = WorkerExit(
                rank=place.rank,
                host=place.host,
                code=event.code,
                signal=event.signal,
                when=max(0.0, event.at - self.started_at),
                max_rss=event.max_rss,
                oom_killed=event.oom_killed,
                stopped=self._was_stopped(event),
                error_file=event.error_file,
            )
        self.exits[place.rank] = end
        self._live.discard(place.rank)
        return end

    def _place(self, host: str, slot: int) -> Placement | None:
        return next((one for one in self.by_host.get(host, ()) if one.local_rank == slot), None)

    def _was_stopped(self, event: WorkerExited) -> bool:
        """Ended because we said so: after our signals, by one of them, or well."""
        if self.stopped_at is None or event.at < self.stopped_at:
            return False
        asked = self.stop_signals | {signal.SIGKILL}
        return event.signal in asked or event.code == 0 or (event.code or 0) - 128 in asked

    @property
    def first_failure(self) -> WorkerExit | None:
        """By the time of its end, not by when the news came: hosts are at different distances."""
        failures = [end for end in self.exits.values() if not end.ok and not end.stopped]
        return min(failures, key=lambda end: (end.when, end.rank), default=None)
