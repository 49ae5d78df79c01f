"""Events of a job: everything that the engine is told. Times are seconds of the driver's monotonic clock.

They are named tuples: making a class of a frozen dataclass costs half a millisecond, and every start of hvlaunch would
pay for thirty. Code tells them apart by class, never by comparison.
"""

from collections.abc import Mapping

from hvlaunch.errors import Problem
from hvlaunch.job import Host, Look, PortHolder
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Began",
    "DiscoveryFailed",
    "DriverReplaced",
    "DriverStopped",
    "Event",
    "HostAnswers",
    "HostAway",
    "HostBack",
    "HostClosed",
    "HostConnected",
    "HostFacts",
    "HostFailed",
    "HostGone",
    "HostJudged",
    "HostNoise",
    "HostParting",
    "HostPreparing",
    "HostProbed",
    "HostQuiet",
    "HostReady",
    "HostStage",
    "HostSuspected",
    "HostsDiscovered",
    "Interrupted",
    "JobGoesOn",
    "JobHangs",
    "Lull",
    "MasterPort",
    "MoveWanted",
    "RendezvousReached",
    "Sign",
    "StacksTaken",
    "StepReached",
    "ThreadFailed",
    "Tick",
    "UserSignal",
    "WorkerAlone",
    "WorkerAsked",
    "WorkerBeat",
    "WorkerExited",
    "WorkerNotStarted",
    "WorkerStarted",
    "WorkerSuspended",
]


class WorkerPackages(NamedTuple):
    """Packages of the workers' Python on a host."""

    hvlaunch: str | None
    """Version of hvlaunch; None without one."""
    editable: tuple[str, ...]
    """Source directories of editable installs."""


class HostFacts(NamedTuple):
    """An agent's facts about its host."""

    addresses: Mapping[str, tuple[str, ...]]
    """Addresses by interface name."""
    cpus: int
    gpus: int | None
    """None without a request to count."""
    scratch: str
    """The job's private directory on the host."""
    beacon_port: int
    """Port at which the agent answers other hosts' probes."""
    master_port: int
    """A free port, kept for rank 0's store until its workers start."""
    peer_address: str | None
    """Address that the driver connected to, empty if unknown; None for the driver's own machine."""
    python: str | None = None
    """Version of the agent's interpreter."""
    cwd_error: str | None = None
    """Why the working directory is inaccessible."""
    trouble: str | None = None
    """A missing feature of the host's kernel."""
    boot_id: str | None = None
    """The kernel's name for its current boot."""
    machine_id: str | None = None
    """The machine's own id; copies of a disk image, and containers of a machine, may share it."""
    more_ports: tuple[int, ...] = ()
    """Further free ports, kept as master_port is: one for each `{port:NAME}` of the job."""
    directory: str | None = None
    """Where workers start in the host's copy of the working tree; None without one."""
    packages: WorkerPackages | None = None
    """Packages of the workers' Python; None if the command has none, or nobody needs to know."""
    environment: str | None = None
    """Directory of the workers' environment, which --setup has built; None without one."""
    sources: tuple[str, ...] = ()
    """Directories of the copy that come first on PYTHONPATH."""
    library: str | None = None
    """hvlaunch's modules for workers, last on PYTHONPATH; None if the workers' Python has them."""
    fabric: str | None = None
    """Its network hardware, if the job asked for it: JSON for fabric_of()."""
    leased: tuple[str, ...] | None = None
    """GPUs or slots that the host's agent holds for the job; None for a job without leases."""


class Began(NamedTuple):
    """The job begins."""


class HostsDiscovered(NamedTuple):
    """The pool of an elastic job has changed: all its hosts, in order."""

    hosts: tuple[Host, ...]


class DiscoveryFailed(NamedTuple):
    """Discovery failed: the current hosts are unknown."""

    problem: Problem


class HostStage(NamedTuple):
    """Progress of the connection to a host."""

    host: str
    stage: str
    """resolve, connect, log in, passphrase"""


class HostConnected(NamedTuple):
    """SSH is connected, and the agent was sent."""

    host: str


class HostPreparing(NamedTuple):
    """The agent has said hello, and the host gets its copy of the working tree; posted again while that makes progress."""

    host: str


class HostReady(NamedTuple):
    """The agent sent its hello."""

    host: str
    facts: HostFacts


class HostFailed(NamedTuple):
    """The host will not get ready."""

    host: str
    problem: Problem


class HostGone(NamedTuple):
    """A ready host is lost."""

    host: str
    problem: Problem


class HostParting(NamedTuple):
    """The agent ends by itself: it still reports its workers' ends, and then closes."""

    host: str
    problem: Problem
    traceback: str = ""
    """Traceback of the agent's own error."""


class HostClosed(NamedTuple):
    """The agent sent bye, and the channel is closed; `left` processes could not be killed."""

    host: str
    left: int = 0
    pids: tuple[int, ...] = ()
    """Process ids of some."""


class HostNoise(NamedTuple):
    """Another program on the host prints into the agent's channel. Its output is skipped, and reported once."""

    host: str
    text: str
    """First line of its output."""


class HostAway(NamedTuple):
    """The connection to a host's agent is lost, and another is being made; its workers continue."""

    host: str
    cause: str


class HostBack(NamedTuple):
    """A new connection was made after so many seconds; no message is lost."""

    host: str
    seconds: float


class HostQuiet(NamedTuple):
    """The agent has not answered the last ping, so its workers' messages may not arrive either."""

    host: str


class HostAnswers(NamedTuple):
    """The host answers again, or is lost and no longer asked."""

    host: str


class HostSuspected(NamedTuple):
    """The host has given no sign of life for so many seconds, neither to the driver nor to other hosts (--suspect-after)."""

    host: str
    seconds: float


class DriverReplaced(NamedTuple):
    """Another driver continues the job, so many seconds after the last event."""

    seconds: float


class DriverStopped(NamedTuple):
    """The driver was stopped (Ctrl-Z), or had no processor, for this many seconds."""

    seconds: float


class RendezvousReached(NamedTuple):
    """Address at which the host reaches the driver's rendezvous; None: at none of `tried`."""

    host: str
    address: str | None
    tried: tuple[str, ...] = ()
    relay_port: int | None = None
    """Port of the host's own agent, if that relays."""


class HostProbed(NamedTuple):
    """The host reaches the host `target` at `address`; None: no more addresses will follow.

    `agent` is the number in the request.
    """

    host: str
    target: str
    address: str | None
    agent: int = 0


class MasterPort(NamedTuple):
    """The host keeps another port for rank 0's store, since a round took the earlier one."""

    host: str
    port: int
    more: tuple[int, ...] = ()
    """HostFacts.more_ports of the next round."""


class WorkerStarted(NamedTuple):
    """A worker runs. `round` is the round of its start; `start` counts the workers of the slot."""

    host: str
    round: int
    slot: int
    pid: int
    start: int = 0


class WorkerNotStarted(NamedTuple):
    """The host can't start the command; `code` is 126 or 127."""

    host: str
    round: int
    slot: int
    code: int
    cause: str
    start: int = 0


class WorkerExited(NamedTuple):
    host: str
    round: int
    slot: int
    code: int | None
    signal: int | None
    at: float
    max_rss: int | None = None
    oom_killed: bool = False
    port_taken_by: int | None = None
    """Uid of another user whose program listens on MASTER_PORT, which this worker, rank 0, needs."""
    error_file: str | None = None
    start: int = 0
    look: Look = "silent"
    """Kind of its end, by its last output."""
    port_holder: PortHolder | None = None
    """Details of the program of the other user."""


class WorkerAlone(NamedTuple):
    """The worker is about to end well, and never met others, though it has a library for that."""

    host: str
    round: int
    slot: int
    library: str
    start: int = 0


class StacksTaken(NamedTuple):
    """The host's answer to TakeStacks is complete, or empty."""

    host: str
    number: int


class WorkerSuspended(NamedTuple):
    """The worker has been stopped by SIGSTOP for `ElasticOptions.suspension`, and not by `hvlaunch signal`."""

    host: str
    round: int
    slot: int
    start: int = 0


class WorkerAsked(NamedTuple):
    """The worker wants a place in a round after `round`, its newest (-1: none)."""

    host: str
    slot: int
    start: int
    round: int
    commit: int
    """Its newest commit; -1 without any."""
    cause: str | None = None
    """The worker's own reason to leave the round; None after an order, or after the training."""


class WorkerBeat(NamedTuple):
    """The worker lives; `commit` is its newest."""

    host: str
    slot: int
    start: int
    commit: int
    is_last: bool = False
    """No further beats will come."""
    round: int = -1
    """Newest round with a meeting of all workers, or -1."""
    is_done: bool = False
    """True if its training is done."""


class StepReached(NamedTuple):
    """A worker has reported a step beyond those of all rounds before, or has begun its steps anew within the round.

    Only the first of each round is an event: more would fill the journal.
    """

    round: int
    step: int


class Interrupted(NamedTuple):
    """The user or the environment ends the job: SIGINT, SIGTERM, SIGHUP, or SIGPIPE of the console."""

    signal: int


class UserSignal(NamedTuple):
    """A signal for the workers: SIGUSR1, SIGUSR2."""

    signal: int


class MoveWanted(NamedTuple):
    """The workers of a host are to move to another, for maintenance or since it is slow."""

    host: str
    to: str | None = None
    """The host that takes them over; None for any with free slots."""
    reason: str = ""
    """Why the host is slow; empty for a request of the user."""


class HostJudged(NamedTuple):
    """A host is slow, by hvlaunch/telemetry/slow.py; without a reason, the host keeps up again."""

    host: str
    factor: float | None = None
    """Its time for the same work, in times of the others; empty if unknown."""
    reason: str = ""
    evidence: str = ""


class JobHangs(NamedTuple):
    """No rank has made progress for so long, by hvlaunch/telemetry/hang.py."""

    seconds: float
    ranks: tuple[int, ...]
    """Ranks for which the others wait."""
    text: str
    """The waiting ranks, and where they wait."""


class JobGoesOn(NamedTuple):
    """A job that was reported to hang makes progress again."""


class ThreadFailed(NamedTuple):
    """A defect of hvlaunch has ended a thread of the driver."""

    problem: Problem


class Tick(NamedTuple):
    """The engine's deadline has come."""


class Sign(NamedTuple):
    """Newest heartbeat of a worker."""

    host: str
    slot: int
    commit: int
    beat_at: float | None


class Lull(NamedTuple):
    """Idle compaction: the sum of a run of idle turns."""

    signs: tuple[Sign, ...] = ()
    commit: int = -1
    """Newest commit of the round."""
    commit_at: float = 0.0
    next_check: float | None = None
    due: float | None = None
    deadline: float | None = None


Event = (
    Began
    | HostsDiscovered
    | DiscoveryFailed
    | HostStage
    | HostConnected
    | HostPreparing
    | HostReady
    | HostFailed
    | HostGone
    | HostParting
    | HostClosed
    | HostNoise
    | HostAway
    | HostBack
    | DriverReplaced
    | DriverStopped
    | HostQuiet
    | HostAnswers
    | HostSuspected
    | RendezvousReached
    | HostProbed
    | MasterPort
    | WorkerStarted
    | WorkerNotStarted
    | WorkerExited
    | StacksTaken
    | WorkerSuspended
    | WorkerAlone
    | WorkerAsked
    | WorkerBeat
    | StepReached
    | Interrupted
    | UserSignal
    | MoveWanted
    | HostJudged
    | JobHangs
    | JobGoesOn
    | ThreadFailed
    | Tick
    | Lull
)
