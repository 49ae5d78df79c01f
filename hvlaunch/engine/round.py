"""One round: its workers, who has left it, who has ended and how, who failed first; and whether another may follow. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from hvlaunch.engine.causes import (
    Cause,
    JobHung,
    NoCommit,
    NoProgress,
    NotMet,
    RestartsUsedUp,
    WorkerEnded,
    WorkerLeft,
)
from hvlaunch.engine.life import Life
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import ElasticOptions, WorkerExit

__all__ = [
    "FRUITFUL",
    "FRUITLESS_IN_A_ROW",
    "ROUND_TRANSITIONS",
    "Hold",
    "Restarts",
    "Round",
    "RoundState",
    "RoundTrigger",
    "cause_of",
    "first_failed",
    "may_be_consequence",
]

_OWN, _OWN_WHEN_STOPPED, _UNCLEAR, _CONSEQUENCE = range(4)


def may_be_consequence(end: WorkerExit) -> bool:
    """Whether another worker may be the cause of this failure, by what its end looks like."""
    return _weight(end) > _OWN


def first_failed(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """By the time of its end, not by when the news came: hosts are at different distances."""
    return min(_failures(ends), key=lambda end: (end.when, end.rank), default=None)


def cause_of(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """The first of those whose own error it was, even if hvlaunch had stopped it; else the first that failed."""
    ends = tuple(ends)
    suspects = _failures(ends)
    if suspects:
        suspects += [end for end in ends if end.stopped and end.look in ("cause", "unclear")]
    return min(suspects, key=lambda end: (_weight(end), end.when, end.rank), default=None)


def _failures(ends: Iterable[WorkerExit]) -> list[WorkerExit]:
    return [end for end in ends if not end.ok and not end.stopped]


def _weight(end: WorkerExit) -> int:
    if end.oom_killed or end.port_taken_by is not None:
        return _OWN
    match end.look:
        case "consequence":
            return _CONSEQUENCE
        case "unclear":
            return _UNCLEAR
        case "cause":
            return _OWN_WHEN_STOPPED if end.stopped or end.was_told else _OWN
        case _:
            return _CONSEQUENCE if end.was_told else _OWN


FRUITFUL = 15.0
"""Seconds after which a round counts as one that got somewhere, commits or not."""
FRUITLESS_IN_A_ROW = 5


class Restarts:
    """Failures that were made up for. Those older than --restart-window are forgotten; a static job makes up for none."""

    def __init__(self, options: ElasticOptions | None) -> None:
        self._limit = 0 if options is None else options.max_restarts
        self._window = 0.0 if options is None else options.restart_window
        self._failed: deque[float] = deque()
        self._fruitless = 0

    def gained(self) -> None:
        """A round got somewhere, as is known now; or something was done about the last failure after all."""
        self._fruitless = 0

    def failed(self, now: float, *, fruitful: bool | None) -> RestartsUsedUp | NoProgress | None:
        """A round failed, after it had got somewhere or not (None: that tells nothing). Why the job ends, if it does."""
        while self._failed and now - self._failed[0] > self._window:
            self._failed.popleft()
        self._failed.append(now)
        if fruitful is not None:
            self._fruitless = 0 if fruitful else self._fruitless + 1
        if self._limit is not None and len(self._failed) > self._limit:
            return RestartsUsedUp(self._limit)
        if self._fruitless >= FRUITLESS_IN_A_ROW:
            return NoProgress(self._fruitless)
        return None


class RoundState(Enum):
    """How far a round is."""

    RUNNING = "its workers are in it"
    CHANGING = (
        "its workers are to ask for their next places at their next commit, or are stopped for a change"
    )
    BROKEN = "its workers are to leave it at once"
    LEFT = "another round takes its place"


class RoundTrigger(Enum):
    """What changes a round's state."""

    CHANGED = "a larger round can follow, or workers have to leave, or a new training begins"
    FAILED = "a worker or a host has failed, or the round makes no progress"
    FOLLOWED = "the next round begins, or the workers turn out to ask for their places"


ROUND_TRANSITIONS: dict[RoundState, Mapping[RoundTrigger, RoundState]] = {
    RoundState.RUNNING: {
        RoundTrigger.CHANGED: RoundState.CHANGING,
        RoundTrigger.FAILED: RoundState.BROKEN,
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.CHANGING: {
        RoundTrigger.FAILED: RoundState.BROKEN,
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.BROKEN: {
        RoundTrigger.FOLLOWED: RoundState.LEFT,
    },
    RoundState.LEFT: {},
}
"""A failure that waits for its cause (Wait.SETTLING) is no state of its own: a round that changes may have one too."""


class Round:
    """The workers of a round: which have met, failed, ended, and why it ends. Times are seconds of the driver's clock.

    Other modules read its attributes. Its methods alone write them.
    """

    def __init__(self, number: int, launches: Sequence[Launch], now: float, *, commit: int = -1) -> None:
        self.number = number
        self.size = len(launches)
        self.started_at = now
        self._life = Life(f"round {number}", RoundState.RUNNING, ROUND_TRANSITIONS)
        self.cause: Cause | None = None
        """Why the round ended, or is to end; at first why the one before it did."""
        self._broken_at: float | None = None
        self.culprit: str | None = None
        """The host whose failure ended the round."""
        self.suspect: WorkerEnded | None = None
        """The failure that ended the round, unless another one turns out to be its cause."""
        self.is_unexplained = False
        """True if the round failed, and no worker or host is known to be the cause."""
        self.is_unknown = False
        """True if nobody will ever know what became of some workers."""
        self.has_more_time = False
        """True if the driver checked too late which workers have met, and has given them as long again."""
        self.met: set[int] = set()
        """Ranks that have met the others."""
        self.exits: dict[int, WorkerExit] = {}
        """By rank."""
        self.started: set[int] = set()
        """Ranks that are known to have been started."""
        self.hosts = list(dict.fromkeys(launch.host for launch in launches))
        """In order of rank."""
        self.alone: dict[int, str] = {}
        """The ranks that never met others, and the library of each."""
        self._first_commit = self.commit = commit

    @property
    def state(self) -> RoundState:
        return self._life.state

    # State

    def change(self, cause: Cause, now: float) -> None:
        """Let the round end where its workers lose nothing."""
        self._life.go(RoundTrigger.CHANGED, now)
        self.cause = cause

    def break_off(self, cause: Cause, now: float) -> None:
        """Let the workers leave the round at once."""
        self._life.go(RoundTrigger.FAILED, now)
        self.cause, self._broken_at = cause, now

    def leave(self, now: float) -> None:
        """Another round takes its place."""
        self._life.go(RoundTrigger.FOLLOWED, now)

    def inherit(self, before: "Round") -> None:
        """Take over why the round before this one ended: its places are given for that."""
        self.cause = before.cause

    # Cause

    def fail(self, cause: Cause, *, host: str | None, is_host_lost: bool) -> bool:
        """Note a failure; True if `host` is the first that is known to have caused one."""
        self.is_unknown = self.is_unknown or is_host_lost
        is_first = self.state is not RoundState.BROKEN
        is_told_by_victim = isinstance(cause, WorkerLeft | NotMet | NoCommit | JobHung)
        if is_first and host is None and is_told_by_victim:
            self.is_unexplained = True
        if host is None or self.culprit is not None:
            return False
        self.culprit = host
        self.is_unexplained = False
        self.cause = cause  # its peers may have left before, because of what they saw of it
        return True

    def suspect_first(self, end: WorkerEnded) -> None:
        """Take this failure for the cause, unless a worker that is being stopped turns out to have failed for one of its own."""
        self.suspect = end

    def convict(self, cause: WorkerEnded) -> None:
        """Take this failure for the cause: no other can come any more, or it is another than the suspect."""
        self.is_unexplained = cause == self.suspect
        self.culprit, self.suspect = cause.host, None

    def take_doubt(self) -> bool:
        """True, once, if nothing explains the failure, and the hosts may not reach each other."""
        is_doubtful = self.is_unexplained and len(self.hosts) > 1
        self.is_unexplained = self.is_unexplained and not is_doubtful
        return is_doubtful

    # Workers

    def add(self, end: WorkerExit) -> None:
        """Note how a worker of this round ended."""
        self.exits[end.rank] = end
        self.started.add(end.rank)

    def note_started(self, rank: int) -> None:
        """Note that the worker's process runs."""
        self.started.add(rank)

    def note_all_started(self) -> None:
        """Note that all workers run: they have asked for their places."""
        self.started.update(range(self.size))

    def note_alone(self, rank: int, library: str) -> None:
        """Note that the worker never met others, for which it has this library."""
        self.alone[rank] = library

    def has_met(self, rank: int) -> bool:
        """Note that the worker has met the others; True once all have."""
        self.met.add(rank)
        return len(self.met) == self.size

    def give_more_time(self) -> bool:
        """Give the workers more time to meet; False if they had it before."""
        is_first, self.has_more_time = not self.has_more_time, True
        return is_first

    def committed(self, commit: int) -> bool:
        """Note that a worker has this commit; True if it is the round's newest."""
        is_news = commit > self.commit
        self.commit = max(self.commit, commit)
        return is_news

    def is_fruitful(self, now: float) -> bool:
        """True if the round made progress, as far as is known by now."""
        until = now if self._broken_at is None else self._broken_at
        return self.commit > self._first_commit or until - self.started_at >= FRUITFUL

    @property
    def never_started(self) -> tuple[int, ...]:
        """Ranks of whose start nothing was ever heard."""
        return tuple(rank for rank in range(self.size) if rank not in self.started)

    @property
    def failure(self) -> WorkerExit | None:
        """The worker that is the cause, if any has failed."""
        return cause_of(self.exits.values())


_MOST = 240.0


class Hold:
    """A round that was given up before it got anywhere lets the next ones be kept, each twice as long.

    So a pool that flaps does not restart its workers for ever: sooner or later they have the time to begin. Times are
    seconds of the driver's clock.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """For how long a round that begins now is kept."""
        return self._seconds

    def keeps(self, current: Round, now: float, *, is_costly: bool) -> bool:
        """Whether the round may not yet end for a change that may wait; `is_costly` is whether its workers are stopped."""
        return is_costly and now < current.started_at + self._seconds

    def change(self, current: Round, now: float) -> None:
        """The round ends for a change."""
        if now >= current.started_at + max(FRUITFUL, 2 * self._seconds):
            self._seconds = 0.0
        else:
            self._seconds = min(_MOST, max(FRUITFUL, 2 * self._seconds))
