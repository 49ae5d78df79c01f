"""Which worker has which rank: kept here alone, from the engine's actions, and asked by links and watchers."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.causes import Cause
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import WorkerExit

if TYPE_CHECKING:
    from hvlaunch.report.failure_report import RoundFailure

__all__ = ["Failures", "Ranks"]


class Ranks:
    """The newest rank of every worker that ever was. Only one thread may write; any may ask."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, int, int], int] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self.size = 0
        """The number of workers in the newest round."""
        self._born: dict[tuple[str, int, int], int] = {}

    def see(self, actions: Iterable[do.Action]) -> list[Launch]:
        """Learn from the engine's actions who gets which rank; these workers."""
        launches: list[Launch] = []
        for action in actions:
            if isinstance(action, do.Start):
                launches += action.launches
                for launch in action.launches:
                    self._born[launch.host, launch.slot, launch.start] = action.round
            elif isinstance(action, do.Assign):
                launches.append(action.launch)
        for launch in launches:
            place = launch.place
            self.size = place.size
            self._ranks[launch.host, launch.slot, launch.start] = place.rank
            self._places[place.rank] = place.host, place.local_rank
        return launches

    def places(self) -> dict[int, tuple[str, int]]:
        """The newest host and local rank of each rank."""
        return dict(self._places)

    def of(self, host: str, slot: int, start: int) -> int | None:
        """None where there was no such worker."""
        return self._ranks.get((host, slot, start))

    def born(self, host: str, slot: int, start: int) -> int | None:
        """The round that the worker was started for; None where there was no such worker."""
        return self._born.get((host, slot, start))


_MOST_ROUNDS = 50
_MOST_WORKERS = 8
"""Of a round, whose last words are kept."""


class _Seen:
    """A round, as far as it has come."""

    def __init__(self, number: int, size: int, hosts: tuple[str, ...], now: float) -> None:
        self.number = number
        self.size = size
        self.hosts = hosts
        self.began = now
        self.ended: float | None = None
        self.cause: Cause | None = None
        self.failed: list[tuple[WorkerExit, bytes]] = []


class Failures:
    """Sees all events in the driver's thread. `rank_of` has a worker's rank, `tail` its last stderr."""

    def __init__(self, rank_of: Callable[[str, int, int], int | None], tail: Callable[[int], bytes]) -> None:
        self._rank_of = rank_of
        self._tail = tail
        self._rounds: deque[_Seen] = deque(maxlen=_MOST_ROUNDS)
        self._stopped: set[tuple[str, int | None]] = set()
        """Host and slot of workers that were told to end; None is all of the host."""

    def see(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """An event at `now`, and what the engine made of it."""
        if isinstance(event, on.WorkerExited) and self._rounds:
            self._note(event, self._rounds[-1])
        for action in actions:
            match action:
                case tell.RoundStarting(number, workers, hosts) | tell.RoundFormed(number, workers, hosts):
                    self._close(now)
                    self._rounds.append(_Seen(number, workers, tuple(dict.fromkeys(hosts)), now))
                    self._stopped.clear()
                case do.Break(_, cause) | do.Change(_, cause) | tell.RoundEnding(_, cause):
                    self._end(cause, now)
                case do.Stop(host, _, slots):
                    self._stopped.update((host, slot) for slot in ((None,) if slots is None else slots))
                case _:
                    pass

    def _note(self, event: on.WorkerExited, current: _Seen) -> None:
        was_stopped = not self._stopped.isdisjoint({(event.host, event.slot), (event.host, None)})
        rank = self._rank_of(event.host, event.slot, event.start)
        if event.code == 0 or was_stopped or rank is None or len(current.failed) == _MOST_WORKERS:
            return
        end = WorkerExit(
            rank=rank,
            host=event.host,
            code=event.code,
            signal=event.signal,
            when=max(0.0, event.at - current.began),
            max_rss=event.max_rss,
            oom_killed=event.oom_killed,
            port_taken_by=event.port_taken_by,
            port_holder=event.port_holder,
            error_file=event.error_file,
            look=event.look,
        )
        current.failed.append((end, self._tail(rank)))

    def _close(self, now: float) -> None:
        """Another round begins: of one whose workers had all ended, nothing else was told."""
        current = self._rounds[-1] if self._rounds else None
        if current is not None and current.ended is None and current.failed:
            current.ended = now

    def _end(self, cause: Cause, now: float) -> None:
        current = self._rounds[-1] if self._rounds else None
        if current is not None and current.ended is None:
            current.ended, current.cause = now, cause

    def rounds(self) -> "tuple[RoundFailure, ...]":
        """Those that have ended before their time, the oldest first."""
        from hvlaunch.report.evidence import find_evidence  # noqa: PLC0415 (when somebody wants to know)
        from hvlaunch.report.failure_report import RoundFailure  # noqa: PLC0415 (as above)
        from hvlaunch.watch.sentences import because  # noqa: PLC0415 (as above)

        return tuple(
            RoundFailure(
                one.number,
                one.size,
                one.hosts,
                one.ended - one.began,
                None if one.cause is None else because(one.cause),
                tuple((end, find_evidence(end, tail)) for end, tail in one.failed),
            )
            for one in [*self._rounds]
            if one.ended is not None
        )
