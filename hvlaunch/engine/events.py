"""What happens to a job: all that the engine is ever told. Times are seconds of the driver's monotonic clock.

Named tuples, since making the class of a frozen dataclass costs half a millisecond, and every start
of hvlaunch would pay for thirty. They are told apart by their class, never by comparing.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hvlaunch.errors import Problem
from hvlaunch.job import Host, Look, PortHolder

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
    "HostNoise",
    "HostParting",
    "HostProbed",
    "HostQuiet",
    "HostReady",
    "HostStage",
    "HostsDiscovered",
    "Interrupted",
    "JobGoesOn",
    "JobHangs",
    "Lull",
    "MasterPort",
    "RendezvousReached",
    "Sign",
    "StacksTaken",
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


class HostFacts(NamedTuple):
    """The facts that an agent tells of its host."""

    addresses: Mapping[str, tuple[str, ...]]
    """By interface name."""
    cpus: int
    gpus: int | None
    """None where they were not asked for."""
    scratch: str
    """The job's private directory there."""
    beacon_port: int
    """Where the agent answers other hosts' probes."""
    master_port: int
    """A free port, kept for rank 0's store until its workers start."""
    peer_address: str | None
    """Where the driver connected to, empty if not known; None where the host is the driver's own machine."""
    python: str | None = None
    """The version of the agent's interpreter."""
    cwd_error: str | None = None
    """Why the working directory can't be entered."""
    trouble: str | None = None
    """What the host's kernel lacks."""
    boot_id: str | None = None
    """What the kernel calls itself since it booted."""


class Began(NamedTuple):
    """The job is to start."""


class HostsDiscovered(NamedTuple):
    """The pool of an elastic job has changed: all its hosts, in order."""

    hosts: tuple[Host, ...]


class DiscoveryFailed(NamedTuple):
    """Nobody knows which hosts there are now."""

    problem: Problem


class HostStage(NamedTuple):
    """How far the connection to a host is."""

    host: str
    stage: str
    """resolve, connect, log in, passphrase"""


class HostConnected(NamedTuple):
    """SSH is through; the agent was sent."""

    host: str


class HostReady(NamedTuple):
    """The agent said hello."""

    host: str
    facts: HostFacts


class HostFailed(NamedTuple):
    """The host will not get ready."""

    host: str
    problem: Problem


class HostGone(NamedTuple):
    """A host that was ready is gone."""

    host: str
    problem: Problem


class HostParting(NamedTuple):
    """The agent ends on its own account: it still tells how its workers end, and then closes."""

    host: str
    problem: Problem
    traceback: str = ""
    """Where it ends for an error of its own."""


class HostClosed(NamedTuple):
    """The agent has said bye and the channel is closed: `left` processes could not be ended."""

    host: str
    left: int = 0
    pids: tuple[int, ...] = ()
    """Of some of them."""


class HostNoise(NamedTuple):
    """Something else on the host still prints into the agent's channel. It is skipped, and told once."""

    host: str
    text: str
    """Its first line."""


class HostAway(NamedTuple):
    """The connection to a host's agent is lost, and another is being made; workers go on meanwhile."""

    host: str
    cause: str


class HostBack(NamedTuple):
    """There is another connection, after so many seconds, and nothing of what was said is lost."""

    host: str
    seconds: float


class HostQuiet(NamedTuple):
    """The host's agent has not answered the last ping: what its workers send may not come through either."""

    host: str


class HostAnswers(NamedTuple):
    """It does again; or it is lost, and nobody asks any more."""

    host: str


class DriverReplaced(NamedTuple):
    """Another driver goes on with the job. Nothing was heard or done since the last event, so many seconds ago."""

    seconds: float


class DriverStopped(NamedTuple):
    """The driver was stopped (Ctrl-Z), or had no processor: it goes on so many seconds later than it wanted to."""

    seconds: float


class RendezvousReached(NamedTuple):
    """Where the host reaches the driver's rendezvous; None: at none of `tried`."""

    host: str
    address: str | None
    tried: tuple[str, ...] = ()
    relay_port: int | None = None
    """The port there, where it is the host's own agent that relays."""


class HostProbed(NamedTuple):
    """The host reaches another host, `target`, at `address`; None: no more addresses will follow.

    `agent` is that of the question.
    """

    host: str
    target: str
    address: str | None
    agent: int = 0


class MasterPort(NamedTuple):
    """The host keeps another port for rank 0's store, since the one before was given to a round."""

    host: str
    port: int


class WorkerStarted(NamedTuple):
    """`round` is the one it was started for; `start` counts the workers that the slot has had."""

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
    """The uid of another user whose program listens where this worker, rank 0, was to: on MASTER_PORT."""
    error_file: str | None = None
    start: int = 0
    look: Look = "silent"
    """What its end looks like, by what it wrote last."""
    port_holder: PortHolder | None = None
    """The program of that user in more detail."""


class WorkerAlone(NamedTuple):
    """The worker is about to end well, and was never seen to meet others, for which it has a library."""

    host: str
    round: int
    slot: int
    library: str
    start: int = 0


class StacksTaken(NamedTuple):
    """What the host has to say for TakeStacks is there, or it has nothing to say."""

    host: str
    number: int


class WorkerSuspended(NamedTuple):
    """The worker is stopped (SIGSTOP, a debugger), and has been for --worker-timeout."""

    host: str
    round: int
    slot: int
    start: int = 0


class WorkerAsked(NamedTuple):
    """The worker wants a place in a round newer than `round`, the last that it was in (-1: none)."""

    host: str
    slot: int
    start: int
    round: int
    commit: int
    """The newest that it has; -1 where there is none."""
    cause: str | None = None
    """Why it left that round by itself, in its own words; None where it was told to, or its training is done."""


class WorkerBeat(NamedTuple):
    """The worker lives, and has got as far as `commit`."""

    host: str
    slot: int
    start: int
    commit: int
    is_last: bool = False
    """It will be silent from here on."""
    round: int = -1
    """The newest round in which it has met the others (-1: none)."""
    is_done: bool = False
    """Whether its training has come to its end."""


class Interrupted(NamedTuple):
    """The user, or whoever runs hvlaunch, wants the job to end: SIGINT, SIGTERM, SIGHUP, or SIGPIPE of the console."""

    signal: int


class UserSignal(NamedTuple):
    """A signal that is meant for the workers: SIGUSR1, SIGUSR2."""

    signal: int


class JobHangs(NamedTuple):
    """No rank has got on for so long, by what their hosts say: hvlaunch/telemetry/hang.py."""

    seconds: float
    ranks: tuple[int, ...]
    """Those that the others wait for."""
    text: str
    """Who waits for whom, and where."""


class JobGoesOn(NamedTuple):
    """A job that was said to hang does not."""


class ThreadFailed(NamedTuple):
    """A thread of the driver has ended for a defect of hvlaunch."""

    problem: Problem


class Tick(NamedTuple):
    """The engine's deadline has come."""


class Sign(NamedTuple):
    """What beats have told of a worker."""

    host: str
    slot: int
    commit: int
    beat_at: float | None


class Lull(NamedTuple):
    """In place of many turns one after the other in which nothing happened: what they came to."""

    signs: tuple[Sign, ...] = ()
    commit: int = -1
    """The round's newest."""
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
    | Interrupted
    | UserSignal
    | JobHangs
    | JobGoesOn
    | ThreadFailed
    | Tick
    | Lull
)
