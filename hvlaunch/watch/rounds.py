"""The lifecycle of a job's rounds, derived from the engine's actions: members, ranks, begins and ends, and failures.

The engine's own Round serves decisions. Watchers see only events and actions, and ask this module.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts
from hvlaunch.engine.causes import Cause
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import WorkerExit
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.report.failure_report import RoundFailure

__all__ = ["Failures", "Member", "Ranks", "RoundBegin", "RoundEnd", "round_change"]

Member: TypeAlias = tuple[str, int, int]
"""A worker, by host, slot and start."""

_MOST_ROUNDS = 50
_MOST_WORKERS = 8
"""Failed workers of a round whose last output is kept."""


class RoundBegin(NamedTuple):
    """A round begins."""

    number: int
    size: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    members: frozenset[Member]
    is_formed: bool
    """True for a round of running workers; False if its workers are being started."""


class RoundEnd(NamedTuple):
    """A round ends, or is to end."""

    cause: Cause
    is_at_once: bool
    """False if its workers continue until their next commit."""


def round_change(action: do.Action, actions: Sequence[do.Action]) -> RoundBegin | RoundEnd | None:
    """Return the begin or end of a round that this action of a turn's `actions` stands for, if any."""
    match action:
        case facts.RoundStarting(number, size, hosts):
            starts = [start for start in actions if isinstance(start, do.Start) and start.round == number]
            members = {
                (start.host, launch.slot, launch.start) for start in starts for launch in start.launches
            }
            return RoundBegin(number, size, hosts, frozenset(members), is_formed=False)
        case facts.RoundFormed(number, size, hosts):
            launches = [assign.launch for assign in actions if isinstance(assign, do.Assign)]
            members = {(launch.host, launch.slot, launch.start) for launch in launches}
            return RoundBegin(number, size, hosts, frozenset(members), is_formed=True)
        case do.Break(_, cause) | facts.RoundEnding(_, cause):
            return RoundEnd(cause, is_at_once=True)
        case do.Change(_, cause):
            return RoundEnd(cause, is_at_once=False)
        case _:
            return None


class Ranks:
    """The newest rank of every worker that ever was started.

    The loop's thread updates it; links and watchers ask in any thread. No lock is needed: each answer is one lookup, and
    entries are never removed.
    """

    def __init__(self) -> None:
        self._ranks: dict[Member, int] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._rounds: dict[Member, int] = {}
        self.size = 0
        """The number of workers in the newest round."""

    def update(self, actions: Iterable[do.Action]) -> list[Launch]:
        """Note the ranks that these actions give to workers; return these workers."""
        launches: list[Launch] = []
        for action in actions:
            if isinstance(action, do.Start):
                launches += action.launches
                for launch in action.launches:
                    self._rounds[launch.host, launch.slot, launch.start] = action.round
            elif isinstance(action, do.Assign):
                launches.append(action.launch)
        # Start and Assign alike: a worker of an elastic job changes its rank from round to round.
        for launch in launches:
            place = launch.place
            self.size = place.size
            self._ranks[launch.host, launch.slot, launch.start] = place.rank
            self._places[place.rank] = place.host, place.local_rank
        return launches

    def places(self) -> dict[int, tuple[str, int]]:
        """Return the newest host and local rank of each rank."""
        # A copy: the loop's thread may change the original while another thread reads.
        return dict(self._places)

    def rank_of(self, host: str, slot: int, start: int) -> int | None:
        """Return the worker's rank; None for an unknown worker."""
        return self._ranks.get((host, slot, start))

    def first_round_of(self, host: str, slot: int, start: int) -> int | None:
        """Return the round that the worker was started for; None for an unknown worker."""
        return self._rounds.get((host, slot, start))


class _Course:
    """The course of a round."""

    def __init__(self, begin: RoundBegin, now: float) -> None:
        self.begin = begin
        self.began = now
        self.ended: float | None = None
        self.cause: Cause | None = None
        self.failed: list[tuple[WorkerExit, bytes]] = []


class Failures:
    """The rounds of an elastic job that ended early, with the workers that failed in each: for the failure report.

    A watcher, for the loop's thread. `rank_of` returns a worker's rank, `tail` the last stderr of a rank.
    """

    def __init__(self, rank_of: Callable[[str, int, int], int | None], tail: Callable[[int], bytes]) -> None:
        self._rank_of = rank_of
        self._tail = tail
        # A job may have any number of rounds; the report shows the newest.
        self._rounds: deque[_Course] = deque(maxlen=_MOST_ROUNDS)
        self._stopped: set[tuple[str, int | None]] = set()
        """Host and slot of stopped workers; slot None stands for every slot."""

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Take note of an event at `now` and its actions."""
        # Before the actions, which may already begin the next round.
        if isinstance(event, on.WorkerExited) and self._rounds:
            self._note_exit(event, self._rounds[-1])
        # In the order of the actions: a Stop before a begin is for workers of the round that has ended.
        for action in actions:
            match round_change(action, actions):
                case RoundBegin() as begin:
                    self._close(now)
                    self._rounds.append(_Course(begin, now))
                    self._stopped.clear()
                case RoundEnd(cause):
                    self._end(cause, now)
                case None:
                    pass
            if isinstance(action, do.Stop):
                slots = (None,) if action.slots is None else action.slots
                self._stopped.update((action.host, slot) for slot in slots)

    def _note_exit(self, event: on.WorkerExited, current: _Course) -> None:
        # A stopped worker ends by hvlaunch's own signal, which is no failure.
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
            error_file=event.error_file,
            look=event.look,
        )
        # Now, since the rank's next worker will print under the same rank.
        current.failed.append((end, self._tail(rank)))

    def _close(self, now: float) -> None:
        """End the current round, without a cause, if workers of it have failed: another round begins."""
        current = self._rounds[-1] if self._rounds else None
        if current is not None and current.ended is None and current.failed:
            current.ended = now

    def _end(self, cause: Cause, now: float) -> None:
        current = self._rounds[-1] if self._rounds else None
        if current is not None and current.ended is None:
            current.ended, current.cause = now, cause

    def rounds(self) -> "tuple[RoundFailure, ...]":
        """Return the rounds that ended early, the oldest first."""
        from hvlaunch.report.evidence import find_evidence  # noqa: PLC0415 (for a report)
        from hvlaunch.report.failure_report import RoundFailure  # noqa: PLC0415 (for a report)
        from hvlaunch.watch.sentences import because  # noqa: PLC0415 (for a report)

        return tuple(
            RoundFailure(
                course.begin.number,
                course.begin.size,
                tuple(dict.fromkeys(course.begin.hosts)),
                course.ended - course.began,
                None if course.cause is None else because(course.cause),
                tuple((end, find_evidence(end, tail)) for end, tail in course.failed),
            )
            for course in [*self._rounds]
            if course.ended is not None
        )
