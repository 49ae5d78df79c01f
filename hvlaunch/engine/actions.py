"""What the engine wants done: all that the driver's loop ever carries out. Facts, which go with it, are in facts.py."""

from typing import NamedTuple

from hvlaunch.engine.causes import Cause
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.facts import Fact
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import Host, JobResult

__all__ = [
    "Abandon",
    "Action",
    "Assign",
    "Break",
    "Change",
    "Connect",
    "Finish",
    "GroupState",
    "HostAddress",
    "HostNetwork",
    "Leave",
    "Probe",
    "Release",
    "Signal",
    "Start",
    "Step",
    "Stop",
    "TakeStacks",
]


class HostAddress(NamedTuple):
    """Where the other hosts of a round reach one of them, and how many workers it has."""

    name: str
    address: str
    workers: int


class HostNetwork(NamedTuple):
    """What the workers of one host are told of the network."""

    master_addr: str
    """Rank 0's host, as the other hosts reach it."""
    master_port: int
    interface: str | None
    """This host's interface towards the others; None leaves the choice to the libraries."""
    rendezvous: tuple[str, int] | None
    """Address and port of the driver's rendezvous, as this host reaches it; None where it can't."""
    address: str = ""
    """This host, as the others reach it; empty where no round was planned yet."""
    hosts: tuple[HostAddress, ...] = ()
    """All hosts of the round, in order of rank."""


class Step(NamedTuple):
    """A signal to a worker that is to end, `after` seconds from the order, if it still lives then."""

    signal: int
    after: float


class Connect(NamedTuple):
    host: Host


class Probe(NamedTuple):
    """Let the host try the addresses of another host's beacon; `agent` counts the agents that the target has had."""

    host: str
    target: str
    addresses: tuple[str, ...]
    port: int
    agent: int = 0


class Start(NamedTuple):
    """Start workers of one host: those of a round, or some that will ask for their place."""

    host: str
    round: int
    launches: tuple[Launch, ...]
    network: HostNetwork
    facts: HostFacts


class Assign(NamedTuple):
    """Tell a worker that has asked its place in a round. `root` is the rank that has the newest commit."""

    round: int
    launch: Launch
    network: HostNetwork
    root: int


class Leave(NamedTuple):
    """Tell a worker that it is not wanted any more, and shall end well."""

    host: str
    slot: int
    start: int
    cause: Cause


class Break(NamedTuple):
    """Tell a round's workers to leave their collectives at once, to roll back, and to ask again."""

    round: int
    cause: Cause


class Change(NamedTuple):
    """Tell a round's workers to ask again at their next commit."""

    round: int
    cause: Cause


class Signal(NamedTuple):
    """Pass a signal to all workers of a host."""

    host: str
    signal: int


class Stop(NamedTuple):
    """End workers of a host (slots None: all), by these steps, which replace those of an earlier Stop."""

    host: str
    steps: tuple[Step, ...]
    slots: tuple[int, ...] | None = None


class TakeStacks(NamedTuple):
    """Let the host say what these workers are doing, before they are killed; StacksTaken with this number is the answer."""

    host: str
    number: int
    slots: tuple[int, ...]


class Release(NamedTuple):
    """Nothing more for this host: its agent ends what is left there, and itself."""

    host: str


class Abandon(NamedTuple):
    """Close the way to the host at once; its agent notices and ends."""

    host: str


class GroupState(NamedTuple):
    """How the workers of an elastic job are, all together, in torch.distributed.elastic's words."""

    state: str
    """INIT, HEALTHY, UNHEALTHY, STOPPED, SUCCEEDED, FAILED or UNKNOWN."""
    round: int | None


class Finish(NamedTuple):
    """The job is over, and nothing of it is left on any host that can be reached."""

    result: JobResult


Action = (
    Connect
    | Probe
    | Start
    | Assign
    | Leave
    | Break
    | Change
    | Signal
    | Stop
    | TakeStacks
    | Release
    | Abandon
    | GroupState
    | Finish
    | Fact
)
