"""Actions of the engine: everything that the driver's loop carries out. facts.py has the facts among them."""

from collections.abc import Mapping

from hvlaunch.engine.causes import Cause
from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.facts import Fact
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import Host, JobResult
from hvlaunch.named_tuples import NamedTuple

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
    """The address of one host of a round for the others, and its number of workers."""

    name: str
    address: str
    workers: int
    ports: tuple[int, ...] = ()
    """Its free ports, in the order of the job's `{port:NAME}`s."""


class HostNetwork(NamedTuple):
    """Network settings for a host's workers."""

    master_addr: str
    """Address of rank 0's host for the other hosts."""
    master_port: int
    interface: str | None
    """This host's interface towards the others; None: the libraries choose."""
    rendezvous: tuple[str, int] | None
    """Address and port of the driver's rendezvous for this host; None if unreachable."""
    address: str = ""
    """Address of this host for the others; empty before the first plan of a round."""
    hosts: tuple[HostAddress, ...] = ()
    """All hosts of the round, in order of rank."""
    variables: Mapping[str, str] | None = None
    """Variables for the choice of adapters; None: the usual ones for `interface`."""


class Step(NamedTuple):
    """A signal that ends a worker, `after` seconds from the order."""

    signal: int
    after: float


class Connect(NamedTuple):
    host: Host


class Probe(NamedTuple):
    """Let the host probe the addresses of another host's beacon; `agent` counts the agents of the target."""

    host: str
    target: str
    addresses: tuple[str, ...]
    port: int
    agent: int = 0


class Start(NamedTuple):
    """Start workers of one host, for a round or to ask for places; in jobs with roles, workers of a single role."""

    host: str
    round: int
    launches: tuple[Launch, ...]
    network: HostNetwork
    facts: HostFacts
    job_hosts: tuple[HostAddress, ...] = ()
    """All hosts of a job with roles; `network` has those of the workers' own role."""


class Assign(NamedTuple):
    """Give an asking worker its place in a round. `root` is the rank with the newest commit."""

    round: int
    launch: Launch
    network: HostNetwork
    root: int


class Leave(NamedTuple):
    """Dismiss a worker without a place: it is to end well."""

    host: str
    slot: int
    start: int
    cause: Cause


class Break(NamedTuple):
    """Make a round's workers leave their collectives at once, roll back, and ask again."""

    round: int
    cause: Cause


class Change(NamedTuple):
    """Make a round's workers ask again at their next commit."""

    round: int
    cause: Cause


class Signal(NamedTuple):
    """Pass a signal to all workers of a host."""

    host: str
    signal: int


class Stop(NamedTuple):
    """End workers of a host (slots None: all) by these steps, replacing the steps of an earlier Stop."""

    host: str
    steps: tuple[Step, ...]
    slots: tuple[int, ...] | None = None


class TakeStacks(NamedTuple):
    """Take the workers' stacks before they are killed; StacksTaken with this number is the answer."""

    host: str
    number: int
    slots: tuple[int, ...]


class Release(NamedTuple):
    """Release the host: its agent ends the remaining processes, and itself."""

    host: str


class Abandon(NamedTuple):
    """Close the connection to the host at once; its agent notices and ends."""

    host: str


class GroupState(NamedTuple):
    """The state of an elastic job's workers in the words of torch.distributed.elastic."""

    state: str
    """INIT, HEALTHY, UNHEALTHY, STOPPED, SUCCEEDED, FAILED or UNKNOWN."""
    round: int | None


class Finish(NamedTuple):
    """The job is over, and no reachable host has processes of the job left."""

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
