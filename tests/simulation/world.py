"""A world for static jobs: virtual hosts, agents and workers, and a seeded choice of the next event.

The world carries out the engine's actions like real hosts, and injects faults.
"""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.errors import ConnectFailed, HostLost
from hvlaunch.job import Host, JobSpec, Look
from tests.simulation.play import Play, facts

__all__ = ["World", "WorldHost"]

MOST_STEPS = 10_000


@dataclass
class WorldHost:
    """The true state of a host."""

    name: str
    number: int
    link: str = "none"
    """none, connecting, connected, ready, closed"""
    live: set[int] = field(default_factory=set)
    """Slots with a living worker."""
    orders: int = 0
    """Number of orders to end; only the newest order counts."""
    starts: dict[int, int] = field(default_factory=dict)
    """Number of the newest worker, by slot."""
    ends: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    outliving: set[int] = field(default_factory=set)
    """Slots whose worker survives all signals."""
    stays: bool = False
    """True if the agent answers pings and does not end."""
    pending: list[on.Event] = field(default_factory=list)
    """Messages from the agent that the driver has not read yet, in order."""


class World(Play):
    """Plays one static job to its end. `failures` is the share of workers that fail, by default `faults`."""

    def __init__(self, seed: int, *, faults: float, failures: float | None = None) -> None:
        super().__init__(seed, most_steps=MOST_STEPS)
        self.faults = faults
        self.failures = faults if failures is None else failures
        names = "abcdef"[: self.random.randint(1, 6)]
        self.hosts = {name: WorldHost(name, number) for number, name in enumerate(names, 1)}
        self.spec = self.make_spec(names)
        self.engine = Engine(self.spec, 4711)
        self.interrupts = 0
        self.most_interrupts = random.Random(f"interrupts {seed}").choice((0, 3, 3))
        """Zero in a third of the jobs, to see that they end without an interrupt."""
        self.sizes: list[int] = []
        self.ranks: dict[tuple[str, int], int] = {}
        self.ended_well: set[int] = set()
        """Ranks that ended with 0."""
        self.broken: list[str] = []
        """Faults of this world in order: the only causes that the result may name."""
        self.has_thief = self.random.random() < 0.2
        """True if another user's program is about to take MASTER_PORT."""
        self.failed_at: float | None = None
        """Time of the first failure that the engine has heard of."""
        self.stopped_at: float | None = None
        """Time of the engine's first order to stop workers, or of the last worker's end."""

    def make_spec(self, names: str) -> JobSpec:
        """Return a job on these hosts."""
        hosts = tuple(Host(name, slots=self.random.randint(1, 3)) for name in names)
        size = self.random.randint(1, sum(host.slots or 0 for host in hosts))
        return JobSpec(
            command=("train",),
            hosts=hosts,
            np=self.random.choice([None, size]),
            skip_bad_hosts=self.random.random() < 0.3,
            end_with_rank=self.random.choice([None, None, 0, size - 1]),
            cwd="/",
            grace=5.0,
            start_timeout=20.0,
            settle=self.random.choice((0.0, 0.2, 2.0)),
        )

    def facts_of(self, host: WorldHost) -> on.HostFacts:
        return facts(host.number)

    def begin(self) -> None:
        self.tell(on.Began())

    def step(self) -> None:
        """Do what is due; otherwise one possible event by chance; if none is possible, let time pass."""
        is_due = any(when is not None and when <= self.now for when in (self.due, self.deadline))
        choices = [] if is_due else self.choices()
        if choices:
            self.random.choice(choices)()
            self._ticks = 0
            self.now += self.random.random() * 0.1
        else:
            super().step()

    def handle(self, event: on.Event) -> list[do.Action]:
        actions = super().handle(event)
        self.interrupts += isinstance(event, on.Interrupted)
        starts = [action for action in actions if isinstance(action, do.Start)]
        self.sizes += [action.launches[0].place.size for action in starts]
        if isinstance(event, on.WorkerExited) and event.code != 0 and self.failed_at is None:
            self.failed_at = self.now
        is_over = self.failed_at is not None and not self.engine.workers.size
        if self.stopped_at is None and (is_over or any(isinstance(action, do.Stop) for action in actions)):
            self.stopped_at = self.now
        return actions

    def choices(self) -> list[Callable[[], None]]:
        """Return all events that are possible now."""
        choices: list[Callable[[], None]] = []
        for host in self.hosts.values():
            if host.pending:
                choices.append(lambda host=host: self.tell(host.pending.pop(0)))  # type: ignore[misc]
            if host.link == "connecting":
                choices.append(lambda host=host: self.connect(host))  # type: ignore[misc]
            if host.link == "connected":
                choices.append(lambda host=host: self.greet(host))  # type: ignore[misc]
            able = sorted(host.live if self.stopped_at is None else host.live - host.outliving)
            choices += [lambda host=host, slot=slot: self.exit(host, slot) for slot in able]  # type: ignore[misc]
            if self.has_thief and (slot := self.slot_of_first(host)) is not None:
                choices += [lambda host=host, slot=slot: self.take_port(host, slot)] * 5  # type: ignore[misc]
            is_well = host.link in ("connected", "ready") and not host.outliving
            if is_well and self.random.random() < self.faults:
                choices += [lambda host=host: self.lose(host), lambda host=host: self.stick(host)]  # type: ignore[misc]
        if self.interrupts < self.most_interrupts and self.random.random() < self.faults:
            choices.append(self.interrupt)
        return choices

    def carry_out(self, action: do.Action) -> None:
        match action:
            case do.Connect(host):
                assert self.hosts[host.name].link == "none"
                self.hosts[host.name].link = "connecting"
            case do.Probe() | do.Start() | do.Stop() | do.Signal() | do.Release():
                self.order(action)
            case do.Abandon(name):
                self.vanish(self.hosts[name])
            case _:
                pass

    def order(self, action: do.Probe | do.Start | do.Stop | do.Signal | do.Release) -> None:
        """Send the action to its host's agent."""
        self.obey(action)

    def obey(self, action: do.Action) -> None:
        """Carry out an order as an agent does."""
        match action:
            case do.Probe(name, target, addresses, _, agent):
                assert self.hosts[target].link in ("ready", "closed")
                for address in addresses:
                    self.send(name, on.HostProbed(name, target, address, agent))
                self.send(name, on.HostProbed(name, target, None, agent))
            case do.Start():
                self.ranks |= {
                    (action.host, launch.place.local_rank): launch.place.rank for launch in action.launches
                }
                self.start(action)
            case do.Stop(name, steps):
                stopped = self.hosts[name]
                stopped.orders += 1
                for step in steps:
                    call = partial(self.deliver, stopped, step.signal, stopped.orders)
                    self.at(step.after, call) if step.after else call()
            case do.Release(name):
                self.release(self.hosts[name])

    def send(self, name: str, event: on.Event) -> None:
        if self.hosts[name].link == "ready":
            self.hosts[name].pending.append(event)

    def connect(self, host: WorldHost) -> None:
        if self.random.random() < self.faults:
            self.broken.append(f"connect {host.name}")
            host.link = "closed"
            self.tell(on.HostFailed(host.name, ConnectFailed("refused", host=host.name).problem))
            return
        host.link = "connected"
        self.tell(on.HostConnected(host.name))

    def greet(self, host: WorldHost) -> None:
        host.link = "ready"
        self.send(host.name, on.HostReady(host.name, self.facts_of(host)))
        self.send(host.name, on.RendezvousReached(host.name, "10.0.0.100"))

    def start(self, start: do.Start) -> None:
        host = self.hosts[start.host]
        host.starts = {launch.slot: launch.start for launch in start.launches}
        assert not host.live, "workers were started twice"
        assert not host.ends
        host.outliving.clear()
        if host.link == "ready":
            host.live = {launch.place.local_rank for launch in start.launches}

    def exit(self, host: WorldHost, slot: int) -> None:
        code = self.random.choice([1, 7, 42]) if self.random.random() < self.failures else 0
        if code:
            self.broken.append(f"exit {code}")
        self.end(host, slot, code, None, self.random.choice(get_args(Look)) if code else "silent")

    def slot_of_first(self, host: WorldHost) -> int | None:
        """Return the slot of rank 0, if it lives on this host."""
        return next((slot for slot in host.live if not self.ranks[host.name, slot]), None)

    def take_port(self, host: WorldHost, slot: int) -> None:
        """Let rank 0 fail because another user's program listens at its MASTER_PORT."""
        self.broken.append("exit 1")
        self.has_thief = False
        self.end(host, slot, 1, None, "cause", 1000)

    def end(
        self,
        host: WorldHost,
        slot: int,
        code: int | None,
        number: int | None,
        look: Look = "silent",
        thief: int | None = None,
    ) -> None:
        host.live.remove(slot)
        if code == 0:
            self.ended_well.add(self.ranks[host.name, slot])
        host.ends[slot] = (code, number)
        event = on.WorkerExited(
            host=host.name,
            round=0,
            slot=slot,
            code=code,
            signal=number,
            at=self.now,
            look=look,
            start=host.starts[slot],
            port_taken_by=thief,
        )
        self.send(host.name, event)

    def deliver(self, host: WorldHost, number: int, orders: int) -> None:
        """Deliver a signal: most workers end by SIGTERM, and all by SIGKILL."""
        if host.orders == orders:
            for slot in sorted(host.live - host.outliving):
                if number == signal.SIGKILL or self.random.random() < 0.7:
                    self.end(host, slot, None, number)

    def release(self, host: WorldHost) -> None:
        assert host.link in ("ready", "closed"), f"{host.name} was released and is {host.link}"
        host.live.clear()
        if not host.stays:
            self.send(host.name, on.HostClosed(host.name))

    def stick(self, host: WorldHost) -> None:
        """Make a worker survive SIGKILL, or the agent stay."""
        self.broken.append(f"stick {host.name}")
        host.outliving = set(host.live)
        host.stays = self.random.random() < 0.5

    def lose(self, host: WorldHost) -> None:
        self.broken.append(f"lose {host.name}")
        was_ready = host.link == "ready"
        self.vanish(host)
        error = HostLost("lost", host=host.name).problem
        self.tell(on.HostGone(host.name, error) if was_ready else on.HostFailed(host.name, error))

    def vanish(self, host: WorldHost) -> None:
        """Let agent and guardian end everything on the host; no message of it arrives any more."""
        host.link = "closed"
        host.live.clear()
        host.pending.clear()

    def interrupt(self) -> None:
        self.broken.append("interrupt")
        self.tell(on.Interrupted(self.random.choice([signal.SIGINT, signal.SIGTERM])))
