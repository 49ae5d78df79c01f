"""Play histories of events to an engine, and keep its actions.

After each test conftest.py replays the journals of its histories.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import Step
from hvlaunch.engine.codec import begin_entry, turn_entry
from hvlaunch.engine.engine import Engine
from hvlaunch.errors import HostLost, Problem
from hvlaunch.job import LONG_LEASE, Host, JobResult, JobSpec, Look

A = TypeVar("A")

PORT = 4711
GENTLE = (Step(signal.SIGTERM, 0.0), Step(signal.SIGKILL, 10.0))
AT_ONCE = (Step(signal.SIGKILL, 0.0),)


def hosts(text: str) -> tuple[Host, ...]:
    """Parse `a:2,b:2`; hosts without slots have an unknown number."""
    pairs = [item.partition(":") for item in text.split(",")]
    return tuple(Host(name, slots=int(slots) if slots else None) for name, _, slots in pairs)


def spec(text: str, **changes: object) -> JobSpec:
    changes = {"lease": LONG_LEASE, **changes}
    return JobSpec(command=("train",), hosts=hosts(text), cwd="/work", **changes)  # type: ignore[arg-type]


def facts(number: int, **changes: object) -> on.HostFacts:
    """Return facts of the host 10.0.0.<number>."""
    values: dict[str, object] = {
        "addresses": {"lo": ("127.0.0.1",), "eth0": (f"10.0.0.{number}",)},
        "cpus": 8,
        "gpus": None,
        "scratch": "/tmp/hvlaunch-x",
        "beacon_port": 9000 + number,
        "master_port": 20000 + number,
        "peer_address": f"10.0.0.{number}",
    }
    return on.HostFacts(**(values | changes))  # type: ignore[arg-type]


def surveyed(number: int, nvlink: str | None = None) -> on.HostFacts:
    """Return facts with the host's hardware: eth0 with 1 Gbit/s, and eth1 with 25 Gbit/s in 10.1.0.0/24."""
    speeds = {"eth0": 1.0, "eth1": 25.0}
    addresses = {name: f"10.{network}.0.{number}" for network, name in enumerate(speeds)}
    usual = {"kind": "ethernet", "is_up": True, "mtu": 1500, "pci": ""}
    interfaces = [
        {**usual, "name": name, "speed": speed, "addresses": [f"{addresses[name]}/24"]}
        for name, speed in speeds.items()
    ]
    fabric: dict[str, object] = {"adapters": [], "interfaces": interfaces, "variables": []}
    survey: dict[str, object] = {"fabric": fabric, "nvlink": nvlink, "times": {}, "trials": []}
    listed = {name: (address,) for name, address in addresses.items()}
    return facts(number, addresses=listed, fabric=json.dumps(survey))


def ready(name: str, number: int) -> list[on.Event]:
    """Return the events of the host 10.0.0.<number> until it reaches the rendezvous."""
    return [
        on.HostConnected(name),
        on.HostReady(name, facts(number)),
        on.RendezvousReached(name, "10.0.0.100"),
    ]


def lost(host: str) -> on.HostGone:
    return on.HostGone(host, HostLost("lost: silent", host=host).problem)


def _is_delayed(action: do.Action, takes: Sequence[do.TakeStacks]) -> bool:
    """True for a request for stacks, and for an order that is repeated after the stacks."""
    if not isinstance(action, do.Stop | do.TakeStacks):
        return False
    return any((action.host, action.slots) == (take.host, take.slots) for take in takes)


class Wanted(list[do.Action]):
    """Actions that are equal only with equal classes, unlike plain named tuples."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and [(type(action), action) for action in self] == [
            (type(action), action) for action in other
        ]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, action: object) -> bool:
        return any(type(member) is type(action) and member == action for member in self)

    __hash__ = None


Self = TypeVar("Self", bound="History")


class History:
    """An engine, its clock, and its actions so far."""

    all: ClassVar[list["History"]] = []
    """Histories of the current test."""

    def __init__(self, job: JobSpec) -> None:
        self.now = 100.0
        self.engine = Engine(job, PORT)
        self.actions: list[do.Action] = []
        self.names = [host.name for host in job.hosts]
        self.journal = [begin_entry("0", "j0b", job, PORT)]
        self.is_journal_whole = True
        """True if the journal has every event of the engine."""
        self.has_stacks = True
        """True if hosts send stacks at once; the delayed orders are then left out."""
        self.all.append(self)

    def play(self, *events: on.Event) -> Wanted:
        """Give the events to the engine now, and return its actions."""
        new, queue = Wanted(), [*events]
        while queue:
            event = queue.pop(0)
            actions = self.engine.handle(event, self.now)
            self.journal.append(turn_entry(event, actions, self.now))
            takes = (
                [action for action in actions if isinstance(action, do.TakeStacks)] if self.has_stacks else []
            )
            queue[:0] = [on.StacksTaken(take.host, take.number) for take in takes]
            delayed = [action for action in actions if _is_delayed(action, takes)]
            new += [action for action in actions if action not in delayed]
        self.actions += new
        return new

    def wait(self) -> Wanted:
        """Let time pass until the engine's deadline."""
        assert self.engine.deadline is not None, "the engine waits for nothing"
        self.now = self.engine.deadline
        return self.play(on.Tick())

    def connect(self, special: Mapping[str, on.HostFacts] | None = None) -> Wanted:
        """Begin, and let all hosts get ready."""
        new = self.play(on.Began())
        for number, name in enumerate(self.names, 1):
            new += self.play(
                on.HostConnected(name), on.HostReady(name, (special or {}).get(name, facts(number)))
            )
        return new

    def wire(self) -> Wanted:
        """Let the hosts reach the rendezvous, and each other."""
        new = self.play(*(on.RendezvousReached(name, "10.0.0.100") for name in self.names))
        for probe in [action for action in self.actions if isinstance(action, do.Probe)]:
            for address in probe.addresses:
                new += self.play(on.HostProbed(probe.host, probe.target, address, probe.agent))
            new += self.play(on.HostProbed(probe.host, probe.target, None, probe.agent))
        return new

    def start(self: Self, special: Mapping[str, on.HostFacts] | None = None) -> Self:  # noqa: PYI019 (typing.Self is Python 3.11)
        self.connect(special)
        self.wire()
        assert self.of(do.Start), "the engine started nothing"
        return self

    def exit(
        self,
        host: str,
        slot: int,
        code: int | None = 0,
        signal: int | None = None,
        after: float = 0.0,
        look: Look = "silent",
        port_taken_by: int | None = None,
    ) -> Wanted:
        """End a slot's newest worker, `after` seconds from now by its host's clock; the news comes at once."""
        number, start = self.born(host, slot)
        at = self.now + after
        return self.play(
            on.WorkerExited(
                host=host,
                round=number,
                slot=slot,
                code=code,
                signal=signal,
                at=at,
                start=start,
                look=look,
                port_taken_by=port_taken_by,
            )
        )

    def born(self, host: str, slot: int) -> tuple[int, int]:
        """Return round and number of a slot's newest worker."""
        births = [
            (start.round, launch.start)
            for start in self.of(do.Start)
            for launch in start.launches
            if launch.seat == (host, slot)
        ]
        return births[-1] if births else (0, 0)

    def ask(
        self, host: str, slot: int, last_round: int = -1, commit: int = -1, cause: str | None = None
    ) -> Wanted:
        """Let a slot's newest worker ask for a place."""
        return self.play(on.WorkerAsked(host, slot, self.born(host, slot)[1], last_round, commit, cause))

    def beat(self, host: str, slot: int, commit: int) -> Wanted:
        return self.play(on.WorkerBeat(host, slot, self.born(host, slot)[1], commit))

    def close(self) -> Wanted:
        """Close every released host."""
        return self.play(*(on.HostClosed(action.host) for action in self.of(do.Release)))

    def of(self, kind: type[A], actions: Sequence[do.Action] | None = None) -> list[A]:
        return [
            action for action in (self.actions if actions is None else actions) if isinstance(action, kind)
        ]

    @property
    def result(self) -> JobResult:
        (finish,) = self.of(do.Finish)
        return finish.result

    @property
    def problem(self) -> Problem:
        """The error that ended the job, other than a worker's failure."""
        problem = self.result.error
        assert problem is not None
        return problem
