"""What the engine lets those who look on know, besides what it wants done: a fact each, with its parts.

Nothing is done about them. hvlaunch/gloo/watch has the words for the user (sentences.py) and the records for programs.
"""

from typing import NamedTuple

from hvlaunch.engine.causes import Cause, WorkerEnded, WorkerHangs
from hvlaunch.errors import Problem

__all__ = [
    "Fact",
    "HostExcluded",
    "HostLeftOver",
    "HostLostAtEnd",
    "HostNotClosing",
    "HostNotUsable",
    "HostSkipped",
    "Interrupting",
    "JobEnding",
    "JobGoingOn",
    "JobHanging",
    "KeepingHosts",
    "KernelLacks",
    "PoolEmpty",
    "RendezvousUnreachable",
    "RoundEnding",
    "RoundFormed",
    "RoundStarting",
    "SharedMachine",
    "SlotsAssumed",
    "SlotsLacking",
    "WorkerEndedEarly",
    "WorkerKilled",
    "WorkerStartFailed",
    "WorkersAlone",
]


# Hosts


class HostNotUsable(NamedTuple):
    """A host did not get ready."""

    problem: Problem
    retry_in: float | None
    """Seconds; None: it is not tried again."""
    goes_on: bool
    """Whether the other hosts have enough slots for the job to go on without it."""


class HostSkipped(NamedTuple):
    """A host failed before the workers started, and the job goes on without it (--skip-bad-hosts)."""

    problem: Problem


class HostExcluded(NamedTuple):
    """A host gets no workers for so many seconds; None: for the rest of the job."""

    host: str
    seconds: float | None
    cause: Cause


class HostLostAtEnd(NamedTuple):
    """A host was lost when the job was ending anyway."""

    problem: Problem


class HostNotClosing(NamedTuple):
    """A host was let go of, and does not answer."""

    host: str


class HostLeftOver(NamedTuple):
    """So many of the job's processes live on there after SIGKILL."""

    host: str
    left: int
    pids: tuple[int, ...] = ()
    """Of some of them."""


class KernelLacks(NamedTuple):
    """A host's kernel lacks what the guardian needs: what a worker detaches there may outlive the job."""

    host: str
    what: str


class RendezvousUnreachable(NamedTuple):
    """A host reaches the driver's rendezvous at none of these addresses; its workers do without."""

    host: str
    tried: tuple[str, ...]
    port: int


class SharedMachine(NamedTuple):
    """These hosts are the same machine, and each uses all of its slots."""

    hosts: tuple[str, ...]


# The pool of an elastic job


class PoolEmpty(NamedTuple):
    """The pool has no hosts: those of the last list are kept, or the first ones are waited for."""

    keeps_hosts: bool


class KeepingHosts(NamedTuple):
    """Nobody knows which hosts there are now: those of the last list are kept."""

    problem: Problem


class SlotsLacking(NamedTuple):
    """There are too few slots for a round; hvlaunch waits for others, `seconds` at most."""

    least: int
    available: int
    seconds: float


# Rounds


class SlotsAssumed(NamedTuple):
    """These hosts get one worker each, because nobody has given a number of slots, and they have no GPU."""

    hosts: tuple[str, ...]


class RoundStarting(NamedTuple):
    """All workers of a round are started."""

    round: int
    workers: int
    hosts: tuple[str, ...]
    """In order of rank."""
    master_addr: str
    master_port: int


class RoundFormed(NamedTuple):
    """Workers that asked have their places. `cause` is why the round before ended; None where there was none."""

    round: int
    workers: int
    hosts: tuple[str, ...]
    cause: Cause | None


class RoundEnding(NamedTuple):
    """The workers of a round are stopped, to be started anew for the next."""

    round: int
    cause: Cause


class WorkerKilled(NamedTuple):
    """A worker hangs, and is killed for it."""

    cause: WorkerHangs


class WorkerEndedEarly(NamedTuple):
    """A worker ended with 0, which ends the training, and had not come to the end of its own."""

    rank: int
    host: str


class WorkerStartFailed(NamedTuple):
    """A worker ended before it asked for a place; the slot gets the next one in so many seconds."""

    end: WorkerEnded
    slot: int
    retry_in: float


# The job


class WorkersAlone(NamedTuple):
    """All workers have ended well, and none was seen to meet another: they may have been as many single jobs."""

    workers: int
    libraries: tuple[str, ...]
    """Those that they had loaded."""


class Interrupting(NamedTuple):
    """A signal ends the job; workers have `grace` seconds."""

    signal: int
    grace: float


class JobHanging(NamedTuple):
    """No rank has got on for so many seconds."""

    seconds: float
    ranks: tuple[int, ...]
    """Those that the others wait for."""
    detail: str
    """Who waits for whom, and where."""


class JobGoingOn(NamedTuple):
    """A job that was said to hang does not."""


class JobEnding(NamedTuple):
    """Failures are made up for no longer."""

    cause: Cause


Fact = (
    HostNotUsable
    | HostSkipped
    | HostExcluded
    | HostLostAtEnd
    | HostNotClosing
    | HostLeftOver
    | KernelLacks
    | RendezvousUnreachable
    | SharedMachine
    | PoolEmpty
    | KeepingHosts
    | SlotsLacking
    | SlotsAssumed
    | RoundStarting
    | RoundFormed
    | RoundEnding
    | WorkerEndedEarly
    | WorkerKilled
    | WorkerStartFailed
    | WorkersAlone
    | Interrupting
    | JobHanging
    | JobGoingOn
    | JobEnding
)
