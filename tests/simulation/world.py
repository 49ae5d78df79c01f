"""A world for the engine: virtual hosts, agents and workers, a clock, and a seeded choice of what happens next.

The world does what the engine's actions say, as real hosts would, and breaks things now and then.
"""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from hvlaunch.errors import ConnectFailed, HostLost
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.engine import Engine
from hvlaunch.job import Host, JobResult, JobSpec

__all__ = ["World", "WorldHost"]


@dataclass
class WorldHost:
    """What really is the case on a host."""

    name: str
    number: int
    link: str = "none"
    """none, connecting, connected, ready, closed"""
    live: dict[int, list[do.Step]] = field(default_factory=dict)
    """Slots whose worker lives, with the signals still to come (times are absolute)."""
    ends: dict[int, tuple[int | None, int | None]] = field(default_factory=dict)
    pending: list[on.Event] = field(default_factory=list)
    """What the agent has sent and the driver has not yet read; in order."""


class World:
    """Plays one job to its end. Same seed, same history."""

    def __init__(self, seed: int, *, faults: float) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.history: list[str] = []
        names = "abcdef"[: self.random.randint(1, 6)]
        self.hosts = {name: WorldHost(name, number) for number, name in enumerate(names, 1)}
        self.spec = JobSpec(
            command=("train",),
            hosts=tuple(Host(name, slots=self.random.randint(1, 3)) for name in names),
            cwd="/",
            grace=5.0,
            start_timeout=20.0,
        )
        self.engine = Engine(self.spec, 4711)
        self.result: JobResult | None = None
        self.interrupts = 0
        self.broken: list[str] = []
        """What went wrong in this world, in order: the causes that the result may name."""

    def run(self) -> JobResult:
        """Until the engine has finished. Raises AssertionError where it never does."""
        self.tell(on.Began())
        for _ in range(10_000):
            if self.result is not None:
                return self.result
            self.step()
        raise AssertionError("the job never ended:\n" + "\n".join(self.history[-30:]))

    def step(self) -> None:
        choices = self.choices()
        if choices:
            self.random.choice(choices)()
            self.now += self.random.random() * 0.1
            return
        due = [
            step.after for host in self.hosts.values() for steps in host.live.values() for step in steps[:1]
        ]
        deadline = self.engine.deadline
        assert due or deadline is not None, "nothing can ever happen again:\n" + "\n".join(self.history[-30:])
        self.now = max(self.now, min([*due, *([deadline] if deadline is not None else [])]))
        self.deliver_signals()
        self.tell(on.Tick())

    def choices(self) -> list[Callable[[], None]]:
        """All that may happen now."""
        self.deliver_signals()
        found: list[Callable[[], None]] = []
        for host in self.hosts.values():
            if host.pending:
                found.append(lambda host=host: self.tell(host.pending.pop(0)))  # type: ignore[misc]
            if host.link == "connecting":
                found.append(lambda host=host: self.connect(host))  # type: ignore[misc]
            if host.link == "connected":
                found.append(lambda host=host: self.greet(host))  # type: ignore[misc]
            found += [lambda host=host, slot=slot: self.exit(host, slot) for slot in host.live]  # type: ignore[misc]
            if host.link in ("connected", "ready") and self.random.random() < self.faults:
                found.append(lambda host=host: self.lose(host))  # type: ignore[misc]
        if self.interrupts < 3 and self.random.random() < self.faults:
            found.append(self.interrupt)
        return found

    def tell(self, event: on.Event) -> None:
        self.history.append(f"{self.now:7.2f} {event}")
        for action in self.engine.handle(event, self.now):
            self.history.append(f"        -> {action}")
            self.carry_out(action)

    def carry_out(self, action: do.Action) -> None:
        assert self.result is None, f"{action} after Finish"
        match action:
            case do.Connect(host):
                assert self.hosts[host.name].link == "none"
                self.hosts[host.name].link = "connecting"
            case do.Probe(name, target, addresses, _):
                assert self.hosts[target].link in ("ready", "closed")
                for address in addresses:
                    self.send(name, on.HostProbed(name, target, address))
                self.send(name, on.HostProbed(name, target, None))
            case do.Start():
                self.start(action)
            case do.Stop(name, steps):
                for slot in self.hosts[name].live:
                    self.hosts[name].live[slot] = [
                        do.Step(step.signal, self.now + step.after) for step in steps
                    ]
            case do.Release(name):
                self.release(self.hosts[name])
            case do.Abandon(name):
                self.vanish(self.hosts[name])
            case do.Finish(result):
                self.result = result
            case _:
                pass

    def send(self, name: str, event: on.Event) -> None:
        if self.hosts[name].link == "ready":
            self.hosts[name].pending.append(event)

    def connect(self, host: WorldHost) -> None:
        if self.random.random() < self.faults:
            self.broken.append(f"connect {host.name}")
            host.link = "closed"
            self.tell(on.HostFailed(host.name, ConnectFailed("refused", host=host.name)))
            return
        host.link = "connected"
        self.tell(on.HostConnected(host.name))

    def greet(self, host: WorldHost) -> None:
        host.link = "ready"
        facts = on.HostFacts(
            addresses={"eth0": [f"10.0.0.{host.number}"]},
            cpus=4,
            gpus=None,
            scratch="/tmp/x",
            beacon_port=1,
            master_port=2,
            peer_address=f"10.0.0.{host.number}",
        )
        self.send(host.name, on.HostReady(host.name, facts))
        self.send(host.name, on.RendezvousReached(host.name, "10.0.0.100"))

    def start(self, start: do.Start) -> None:
        host = self.hosts[start.host]
        assert not host.live, "workers were started twice"
        assert not host.ends
        if host.link == "ready":
            host.live = {place.local_rank: [] for place in start.places}

    def exit(self, host: WorldHost, slot: int) -> None:
        code = self.random.choice([1, 7, 42]) if self.random.random() < self.faults else 0
        if code:
            self.broken.append(f"exit {code}")
        self.end(host, slot, code, None)

    def end(self, host: WorldHost, slot: int, code: int | None, number: int | None) -> None:
        del host.live[slot]
        host.ends[slot] = (code, number)
        event = on.WorkerExited(host=host.name, round=0, slot=slot, code=code, signal=number, at=self.now)
        self.send(host.name, event)

    def deliver_signals(self) -> None:
        """Workers end by TERM mostly, by KILL always."""
        for host in self.hosts.values():
            for slot, steps in list(host.live.items()):
                while steps and steps[0].after <= self.now and slot in host.live:
                    step = steps.pop(0)
                    if step.signal == signal.SIGKILL or self.random.random() < 0.7:
                        self.end(host, slot, None, step.signal)

    def release(self, host: WorldHost) -> None:
        assert host.link in ("ready", "closed"), f"{host.name} was released and is {host.link}"
        host.live.clear()
        self.send(host.name, on.HostClosed(host.name))

    def lose(self, host: WorldHost) -> None:
        self.broken.append(f"lose {host.name}")
        was_ready = host.link == "ready"
        self.vanish(host)
        error = HostLost("lost", host=host.name)
        self.tell(on.HostGone(host.name, error) if was_ready else on.HostFailed(host.name, error))

    def vanish(self, host: WorldHost) -> None:
        """The host's agent and guardian end everything there, and nothing of it is heard any more."""
        host.link = "closed"
        host.live.clear()
        host.pending.clear()

    def interrupt(self) -> None:
        self.interrupts += 1
        self.broken.append("interrupt")
        self.tell(on.Interrupted(self.random.choice([signal.SIGINT, signal.SIGTERM])))
