"""Why the engine does what it does: why a round ends, a host is excluded, a worker dismissed, the job given up.

They are data. hvlaunch/watch/sentences.py has the words for them.
"""

from typing import Literal, NamedTuple

from hvlaunch.errors import Problem

__all__ = [
    "Cause",
    "HostProblem",
    "JobHung",
    "MoreWorkers",
    "NewTraining",
    "NoCommit",
    "NoProgress",
    "NotMet",
    "RankDone",
    "RestartsUsedUp",
    "SlotGone",
    "StartsFailed",
    "TrainingDone",
    "WorkerEnded",
    "WorkerHangs",
    "WorkerLeft",
    "WorkersFail",
    "WorkersToLeave",
]


class WorkerEnded(NamedTuple):
    """A worker failed."""

    rank: int
    host: str
    code: int | None
    signal: int | None
    not_started: str | None
    """Why it could not be started."""


class WorkerHangs(NamedTuple):
    """A worker does not do what it should: it is silent, stopped (SIGSTOP, a debugger), or still in a round that ended."""

    rank: int
    host: str
    how: Literal["silent", "stopped", "late"]
    seconds: float | None
    """For how long, at least; None where it is late."""


class WorkerLeft(NamedTuple):
    """A worker left its round by itself, before it was known that the round had failed."""

    rank: int
    host: str
    words: str
    """The worker's own, cut."""


class NoCommit(NamedTuple):
    """No worker of the round has committed anything for so long."""

    seconds: float


class JobHung(NamedTuple):
    """No worker of the round has got on for so long (--hang-timeout)."""

    seconds: float
    detail: str
    """Who waits for whom, and where."""


class NotMet(NamedTuple):
    """These workers of a round have not met the others within so many seconds."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float


class HostProblem(NamedTuple):
    """Something is wrong with a host."""

    problem: Problem


class WorkersFail(NamedTuple):
    """The workers of a host fail again and again, the last one for this cause."""

    cause: WorkerEnded | WorkerHangs


class RankDone(NamedTuple):
    """The rank has ended well with which the job is to end (--end-with-rank)."""

    rank: int
    host: str


class TrainingDone(NamedTuple):
    """The job's work is done."""


class NewTraining(NamedTuple):
    """A worker has done its training, and begins another one."""


class SlotGone(NamedTuple):
    """The worker's slot has left the pool, or its host has."""

    host: str


class WorkersToLeave(NamedTuple):
    """The slots of workers on these hosts have left the pool."""

    hosts: tuple[str, ...]


class MoreWorkers(NamedTuple):
    """The next round can have so many more."""

    workers: int


class RestartsUsedUp(NamedTuple):
    """As many failures were made up for as --max-restarts says."""

    limit: int


class NoProgress(NamedTuple):
    """So many rounds in a row failed before their workers had done anything."""

    times: int


class StartsFailed(NamedTuple):
    """So many workers in a row ended in one slot before they asked for a place."""

    times: int


Cause = (
    WorkerEnded
    | WorkerHangs
    | WorkerLeft
    | NoCommit
    | JobHung
    | NotMet
    | HostProblem
    | WorkersFail
    | RankDone
    | TrainingDone
    | NewTraining
    | SlotGone
    | WorkersToLeave
    | MoreWorkers
    | RestartsUsedUp
    | NoProgress
    | StartsFailed
)
