"""Reasons for the engine's decisions: the end of a round or job, an excluded host, a dismissed worker.

They are data; hvlaunch/watch/sentences.py puts them into words.
"""

from typing import Literal

from hvlaunch.errors import Problem
from hvlaunch.job import WorkerExit
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Cause",
    "Ending",
    "HostProblem",
    "HostSilent",
    "JobHung",
    "MoreWorkers",
    "NewTraining",
    "NoCommit",
    "NoProgress",
    "NotMet",
    "RankDone",
    "RestartsUsedUp",
    "RoleDone",
    "SlotGone",
    "StartsFailed",
    "TrainingDone",
    "WorkerEnded",
    "WorkerHangs",
    "WorkerLeft",
    "WorkersFail",
    "WorkersMoved",
    "WorkersToLeave",
]


class WorkerEnded(NamedTuple):
    """A worker failed."""

    rank: int
    host: str
    code: int | None
    signal: int | None
    not_started: str | None
    """The reason for a failed start."""
    role: str = ""
    """Its role and its rank there, `gen:1`; empty in jobs without roles."""


class WorkerHangs(NamedTuple):
    """A worker hangs: it is silent, stopped (SIGSTOP), or still in a round that ended."""

    rank: int
    host: str
    how: Literal["silent", "stopped", "late"]
    seconds: float | None
    """Its least duration; None for a late worker."""


class WorkerLeft(NamedTuple):
    """A worker left its round by itself, before the failure of the round was known."""

    rank: int
    host: str
    words: str
    """The worker's own words, cut."""


class NoCommit(NamedTuple):
    """No worker of the round has committed for so long."""

    seconds: float


class JobHung(NamedTuple):
    """No worker of the round has made progress for so long (--hang-timeout)."""

    seconds: float
    detail: str
    """The waiting ranks, and where they wait."""


class NotMet(NamedTuple):
    """These workers of a round did not meet the others in time."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    seconds: float


class HostProblem(NamedTuple):
    """A problem of a host."""

    problem: Problem


class WorkersMoved(NamedTuple):
    """The host's workers were moved to another, and the job needs it again."""


class HostSilent(NamedTuple):
    """The host has given no sign of life for so long (--suspect-after), and is not lost yet."""

    host: str
    seconds: float


class WorkersFail(NamedTuple):
    """The host's workers fail repeatedly; `cause` is the newest failure."""

    cause: WorkerEnded | WorkerHangs


class RankDone(NamedTuple):
    """The rank of --end-with-rank has ended well."""

    rank: int
    host: str


class RoleDone(NamedTuple):
    """The workers of the role of --end-with-role have ended well."""

    role: str


class TrainingDone(NamedTuple):
    """The training is done."""


class NewTraining(NamedTuple):
    """A worker has done its training, and begins another one."""


class SlotGone(NamedTuple):
    """The worker's slot or host has left the pool."""

    host: str


class WorkersToLeave(NamedTuple):
    """Slots of workers on these hosts have left the pool."""

    hosts: tuple[str, ...]


class MoreWorkers(NamedTuple):
    """The next round can have this many more workers."""

    workers: int


class RestartsUsedUp(NamedTuple):
    """More failures than --max-restarts."""

    limit: int


class NoProgress(NamedTuple):
    """So many rounds in a row failed before their workers made progress."""

    times: int
    suspect: str | None = None
    """The host with most of the first failures; None if no host has two."""


class StartsFailed(NamedTuple):
    """Workers of one slot ended this many times in a row before asking for a place."""

    times: int


Cause = (
    WorkerEnded
    | WorkerHangs
    | WorkerLeft
    | NoCommit
    | JobHung
    | NotMet
    | HostProblem
    | HostSilent
    | WorkersFail
    | WorkersMoved
    | RankDone
    | RoleDone
    | TrainingDone
    | NewTraining
    | SlotGone
    | WorkersToLeave
    | MoreWorkers
    | RestartsUsedUp
    | NoProgress
    | StartsFailed
)


class Ending(NamedTuple):
    """Reason for an early end of a job: an error, or a worker's failure."""

    error: Problem | None = None
    failure: WorkerExit | None = None
    cause: RestartsUsedUp | NoProgress | StartsFailed | RankDone | RoleDone | None = None
    """Why no other round follows, or why the job does not wait for its other workers."""
