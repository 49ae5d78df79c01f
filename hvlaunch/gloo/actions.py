"""What the engine wants done: all that the driver's loop ever carries out."""

from collections.abc import Sequence
from typing import NamedTuple

from hvlaunch.gloo.events import HostFacts
from hvlaunch.gloo.worker_env import HostNetwork
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import Host, JobResult

__all__ = [
    "Abandon",
    "Action",
    "Connect",
    "Finish",
    "Probe",
    "Release",
    "Say",
    "Signal",
    "Start",
    "Step",
    "Stop",
]


class Step(NamedTuple):
    """A signal to a worker that is to end, `after` seconds from the order, if it still lives then."""

    signal: int
    after: float


class Connect(NamedTuple):
    host: Host


class Probe(NamedTuple):
    """Let the host try the addresses of another host's beacon."""

    host: str
    target: str
    addresses: Sequence[str]
    port: int


class Start(NamedTuple):
    """Start a round's workers of one host."""

    host: str
    round: int
    places: Sequence[Placement]
    network: HostNetwork
    facts: HostFacts


class Signal(NamedTuple):
    """Pass a signal to all workers of a host."""

    host: str
    signal: int


class Stop(NamedTuple):
    """End all workers of a host, by these steps, which replace those of an earlier Stop."""

    host: str
    steps: Sequence[Step]


class Release(NamedTuple):
    """Nothing more for this host: its agent ends what is left there, and itself."""

    host: str


class Abandon(NamedTuple):
    """Close the way to the host at once; its agent notices and ends."""

    host: str


class Say(NamedTuple):
    """Tell the user; `detail` only where he asked for details, `error` even where he asked for quiet."""

    text: str
    detail: bool = False
    error: bool = False


class Finish(NamedTuple):
    """The job is over, and nothing of it is left on any host that can be reached."""

    result: JobResult


Action = Connect | Probe | Start | Signal | Stop | Release | Abandon | Say | Finish
