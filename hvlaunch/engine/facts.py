"""Facts that the engine reports to observers, beside its actions.

The driver carries none of them out. hvlaunch/watch has the words for the user (sentences.py) and the records for programs.
"""

from hvlaunch.engine.causes import Cause, WorkerEnded, WorkerHangs
from hvlaunch.errors import Problem
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Fact",
    "HostExcluded",
    "HostLeftOver",
    "HostLostAtEnd",
    "HostMoved",
    "HostMoving",
    "HostNotClosing",
    "HostNotUsable",
    "HostSetAside",
    "HostSkipped",
    "HostSlow",
    "HostStays",
    "HostTakenIn",
    "Interrupting",
    "JobEnding",
    "JobGoingOn",
    "JobHanging",
    "KeepingHosts",
    "KernelLacks",
    "MoveBeginning",
    "NetworkChosen",
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
    """Seconds; None: no retry."""
    goes_on: bool
    """True if the other hosts have enough slots for the job to continue."""


class HostSkipped(NamedTuple):
    """A host failed before the workers started, and the job continues without it (--skip-bad-hosts)."""

    problem: Problem


class HostExcluded(NamedTuple):
    """A host gets no workers for so many seconds; None: for the rest of the job."""

    host: str
    seconds: float | None
    cause: Cause


class HostSlow(NamedTuple):
    """The others wait for a slow host."""

    host: str
    factor: float | None
    """Its time for the same work, in times of the others; empty if unknown."""
    kind: str
    """clock, throttling, cpu, memory, disk or network."""
    evidence: str
    """Cause of the slowness, in words."""


class MoveBeginning(NamedTuple):
    """Workers start to replace those of a host; the round runs on."""

    host: str
    to: str | None
    """The host that takes them over; None for any."""
    reason: str
    """Why the host is slow; empty for a request of the user."""


class HostMoving(NamedTuple):
    """The new workers wait for places: the host's workers leave at the next commit."""

    host: str
    to: tuple[str, ...]
    """Hosts of the new workers."""


class HostMoved(NamedTuple):
    """The round runs without the host, and its workers have ended."""

    host: str
    round: int
    seconds: float
    """Time since the request."""


class HostStays(NamedTuple):
    """A host can't be moved, for the reason in words; the job continues on it."""

    host: str
    reason: str
    was_moving: bool = False
    """False if the request is refused."""


class HostSetAside(NamedTuple):
    """The host gives no sign of life. The other hosts go on without the host, which may return."""

    host: str
    seconds: float


class HostTakenIn(NamedTuple):
    """The set-aside host answers again, and its workers may take part again."""

    host: str


class HostLostAtEnd(NamedTuple):
    """A host was lost while the job was ending anyway."""

    problem: Problem


class HostNotClosing(NamedTuple):
    """A released host does not answer."""

    host: str


class HostLeftOver(NamedTuple):
    """So many of the job's processes survive SIGKILL on the host."""

    host: str
    left: int
    pids: tuple[int, ...] = ()
    """Process ids of some."""


class KernelLacks(NamedTuple):
    """The host lacks a feature of the kernel, or its own /proc; `what` also says what follows."""

    host: str
    feature: str


class RendezvousUnreachable(NamedTuple):
    """A host can't reach the driver's rendezvous at these addresses; its workers do without."""

    host: str
    tried: tuple[str, ...]
    port: int


class SharedMachine(NamedTuple):
    """These hosts are the same machine, and each uses all of its slots."""

    hosts: tuple[str, ...]


class NetworkChosen(NamedTuple):
    """The adapters for NCCL and Gloo in a round are chosen."""

    round: int
    reasons: tuple[str, ...]
    is_split: bool
    """True if the adapters of the hosts can't work together."""


# The pool of an elastic job


class PoolEmpty(NamedTuple):
    """The list of hosts is empty: the job keeps the earlier hosts, or waits for the first ones."""

    keeps_hosts: bool


class KeepingHosts(NamedTuple):
    """Discovery failed: the job keeps the earlier hosts."""

    problem: Problem


class SlotsLacking(NamedTuple):
    """There are too few slots for a round; the job waits for more, `seconds` at most."""

    least: int
    available: int
    seconds: float


# Rounds


class SlotsAssumed(NamedTuple):
    """These hosts get one worker each, since their number of slots is unknown and they have no GPU."""

    hosts: tuple[str, ...]
    cpus: int = 1
    """The number of processors that each of them has at least."""


class RoundStarting(NamedTuple):
    """A round's workers are started."""

    round: int
    workers: int
    hosts: tuple[str, ...]
    """In order of rank."""
    master_addr: str
    master_port: int


class RoundFormed(NamedTuple):
    """Asking workers got their places. `cause` ended the round before; None for the first round."""

    round: int
    workers: int
    hosts: tuple[str, ...]
    cause: Cause | None


class RoundEnding(NamedTuple):
    """The workers of a round are stopped, and started anew for the next."""

    round: int
    cause: Cause


class WorkerKilled(NamedTuple):
    """A hanging worker is killed."""

    cause: WorkerHangs


class WorkerEndedEarly(NamedTuple):
    """A worker ended with 0, which ends the training, before the end of its own."""

    rank: int
    host: str


class WorkerStartFailed(NamedTuple):
    """A worker ended before asking for a place; the slot is used again after `retry_in` seconds."""

    end: WorkerEnded
    slot: int
    retry_in: float


class WorkerRestarting(NamedTuple):
    """A failed worker, or all workers of its role, start again in `delay` seconds."""

    end: WorkerEnded
    workers: int
    """Number of workers that start again."""
    delay: float


# The job


class WorkersAlone(NamedTuple):
    """All workers ended well without meeting another worker: they may have been single jobs."""

    workers: int
    libraries: tuple[str, ...]
    """Their loaded libraries."""


class Interrupting(NamedTuple):
    """A signal ends the job; workers have `grace` seconds."""

    signal: int
    grace: float


class JobHanging(NamedTuple):
    """No rank has made progress for so many seconds."""

    seconds: float
    ranks: tuple[int, ...]
    """Ranks for which the others wait."""
    detail: str
    """The waiting ranks, and where they wait."""


class JobGoingOn(NamedTuple):
    """A job that was reported to hang makes progress again."""


class JobEnding(NamedTuple):
    """No failure leads to another round any more."""

    cause: Cause


Fact = (
    HostNotUsable
    | HostSkipped
    | HostExcluded
    | HostSlow
    | MoveBeginning
    | HostMoving
    | HostMoved
    | HostStays
    | HostSetAside
    | HostTakenIn
    | HostLostAtEnd
    | HostNotClosing
    | HostLeftOver
    | KernelLacks
    | RendezvousUnreachable
    | SharedMachine
    | NetworkChosen
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
    | WorkerRestarting
    | WorkersAlone
    | Interrupting
    | JobHanging
    | JobGoingOn
    | JobEnding
)
