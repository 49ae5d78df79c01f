"""A world for elastic jobs: hosts, agents, workers and a pool that all fail now and then, on a virtual clock.

What the engine wants is carried out as real agents and workers would, with delays that the seed
chooses. Faults are planned beforehand, and all is healed after a while, so that a job must end well unless
something that happened is a reason for another end.
"""

import heapq
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from hvlaunch.errors import ConnectFailed, DiscoveryFailed, HostLost
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.engine import Engine
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from tests.simulation.faults import LEASE, plan_faults
from tests.simulation.invariants import Invariants

__all__ = ["ElasticWorld", "Process", "SimHost"]

MOST_EVENTS = 6000
BEAT = 5.0
STEP = 2.0

Kind = Literal["in-process", "unmodified"]


@dataclass(eq=False)
class Process:
    """One worker. Its `place` is what it was told, its `round` what it is in."""

    host: "SimHost"
    slot: int
    start: int
    born: int
    agent: int
    live: bool = True
    round: int | None = None
    place: Placement | None = None
    last_round: int = -1
    commit: int = -1
    is_waiting: bool = False
    is_silent: bool = False
    """Stopped: it does nothing, and only SIGKILL ends it."""
    is_stuck: bool = False
    """Lives, and does not leave its round."""
    orders: int = 0
    """How often it was told to end; only the last orders count."""

    def __str__(self) -> str:
        return f"{self.host.name}/{self.slot}/{self.start}"


@dataclass(eq=False)
class SimHost:
    name: str
    number: int
    slots: int
    is_up: bool = True
    is_cut: bool = False
    is_bad: bool = False
    """Workers die soon after their start."""
    is_slow: bool = False
    link: str = "none"
    agent: int = 0
    """Counts the connections."""
    heard_until: float = 0.0
    refusals: int = 0
    """How many workers will not be started."""
    processes: list[Process] = field(default_factory=list)
    unlisted_since: float | None = None
    had: int = 0
    """Slots at first."""

    def __post_init__(self) -> None:
        self.had = self.slots

    @property
    def reachable(self) -> bool:
        return self.is_up and not self.is_cut


class ElasticWorld:
    """Plays one job to its end. Same seed, same history."""

    def __init__(self, seed: int, engine: Callable[[JobSpec, int], Engine] = Engine) -> None:
        self.seed = seed
        self.random = rng = random.Random(seed)
        self.now = 0.0
        self.history: list[str] = []
        self.kind: Kind = "in-process" if rng.random() < 0.7 else "unmodified"
        self.hosts = {
            name: SimHost(name, number, rng.randint(1, 3))
            for number, name in enumerate("abcde"[: rng.randint(1, 5)], 1)
        }
        self.listing = [name for name in self.hosts if rng.random() < 0.8] or ["a"]
        self.options = self._options()
        self.spec = JobSpec(
            command=("train",),
            hosts=() if self.options.discovers else tuple(self._hosts()),
            cwd="/",
            grace=2.0,
            start_timeout=10.0,
            elastic=self.options,
        )
        self.goal = rng.randint(3, 14)
        """Commits until training is done."""
        self.checkpoint = -1
        self.rounds: dict[int, list[Process]] = {}
        self.broken: set[int] = set()
        self.changing: set[int] = set()
        self.faults: list[str] = []
        self.faults_detail = ""
        self.kills_while_placing = 0
        self.asleep_until = 0.0
        self.is_catching_up = False
        """Whether the driver has yet to read what is long true."""
        self._missed: list[tuple[on.Event, SimHost | None, int]] = []
        self.codes: set[int] = set()
        """With which workers failed, of themselves or by a fault."""
        self.ended_well = 0
        self.result: JobResult | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._ticks = 0
        """How many in a row that came at the same time."""
        self.engine = engine(self.spec, 4711)
        self.invariants = Invariants(self)

    def _options(self) -> ElasticOptions:
        rng = self.random
        slots = sum(self.hosts[name].slots for name in self.listing)
        least = rng.randint(1, max(1, slots - 1))
        return ElasticOptions(
            min_np=least,
            max_np=rng.choice([None, least, least + 2]),
            discovery_script="discover" if rng.random() < 0.75 else None,
            elastic_timeout=rng.choice([600.0, 600.0, 25.0]),
            reset_timeout=6.0,
            max_restarts=rng.choice([None, None, None, 2]),
            spares=rng.choice([0, 0, 1]),
            cooldown=rng.choice([(1.0, 8.0), (1.0, 8.0), (1.0, 8.0), None]),
            worker_timeout=12.0,
            commit_timeout=rng.choice([None, 15.0]),
            drain_timeout=6.0,
            exit_grace=6.0,
        )

    def _hosts(self) -> list[Host]:
        return [Host(name, slots=self.hosts[name].slots) for name in self.listing]

    # Time

    def at(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call))

    def delay(self, most: float = 0.2) -> float:
        """Short mostly, long now and then."""
        return self.random.random() * most * (1 if self.random.random() < 0.95 else 10)

    def run(self) -> JobResult:
        """Until the engine has finished. Raises AssertionError where an invariant is broken, or it never does."""
        plan_faults(self)
        self.tell(on.Began())
        if self.options.discovers:
            self.discover()
        for _ in range(MOST_EVENTS):
            if self.result is not None:
                return self.result
            self._step()
        raise AssertionError("the job never ends")

    def _step(self) -> None:
        deadline = self.engine.deadline
        due = self._queue[0][0] if self._queue else None
        if deadline is not None and self.now >= self.asleep_until and (due is None or deadline <= due):
            assert deadline > self.now or self._ticks < 5, "the engine wants ticks without end"
            self._ticks = self._ticks + 1 if deadline <= self.now else 0
            self.now = max(self.now, deadline)
            self.tell(on.Tick())
            return
        assert due is not None, "nothing can ever happen again"
        self.now, _, call = heapq.heappop(self._queue)
        call()

    # The engine

    def tell(self, event: on.Event) -> None:
        if self.result is not None:
            return
        if self.now < self.asleep_until:
            host = self.hosts.get(getattr(event, "host", ""))
            self._missed.append((event, host, host.agent if host is not None else 0))
            return
        quiet = isinstance(event, on.WorkerBeat | on.Tick | on.HostProbed | on.RendezvousReached)
        wanted = self.engine.handle(event, self.now)
        if wanted or not quiet:
            self.history.append(f"{self.now:7.2f} {event}")
        self.invariants.before(wanted)
        for action in wanted:
            self.history.append(f"        -> {action}")
            self._carry_out(action)
        self.invariants.after()

    def wake_up(self) -> None:
        """Read what came while the driver was stopped."""
        missed, self._missed = self._missed, []
        self.is_catching_up = True
        for event, host, agent in missed:
            if host is None or host.agent == agent:  # else it is news of an earlier connection
                self.tell(event)
        self.is_catching_up = False

    def _carry_out(self, action: do.Action) -> None:
        assert self.result is None, f"{action} after Finish"
        match action:
            case do.Connect(host):
                self._connect(self.hosts[host.name])
            case do.Probe(name, target, addresses, _):
                self._probe(self.hosts[name], self.hosts[target], list(addresses))
            case do.Start():
                self._start(action)
            case do.Stop(name, steps, slots):
                self._stop(self.hosts[name], list(steps), slots)
            case do.Place():
                self._place(action)
            case do.Leave(name, slot, start, _):
                self._when_told(name, slot, start, lambda one: self.end(one, 0))
            case do.Break(number, _):
                self.broken.add(number)
                for one in self.rounds.get(number, ()):
                    self.at(self.delay(), lambda one=one: self._leave(one, number))  # type: ignore[misc]
            case do.Change(number, _):
                self.changing.add(number)
            case do.Release(name):
                self._release(self.hosts[name])
            case do.Abandon(name):
                self._abandon(self.hosts[name])
            case do.Finish(result):
                self.result = result
            case _:
                pass

    # Hosts

    def hear(self, host: SimHost, event: on.Event) -> None:
        """The agent's frames come in order, as long as the connection lasts."""
        agent = host.agent
        host.heard_until = max(host.heard_until, self.now + self.delay())

        def deliver() -> None:
            if host.agent != agent or host.link == "none" or not host.is_up:
                return
            if host.is_cut:
                self.at(0.5, deliver)
                return
            if isinstance(event, on.HostClosed):
                self.all_die(host, agent)
                host.link = "none"
            self.tell(event)
            if self.random.random() < 0.05:
                self.at(self.delay(2), lambda: host.agent == agent and self.tell(event))  # type: ignore[func-returns-value]

        self.at(host.heard_until - self.now, deliver)

    def _connect(self, host: SimHost) -> None:
        assert host.link == "none", f"{host.name} is connected twice"
        host.link = "connecting"
        host.agent += 1
        agent = host.agent
        host.heard_until = self.now

        def connected() -> None:
            if host.agent != agent or host.link != "connecting":
                return
            if not host.reachable:
                host.link = "none"
                self.tell(on.HostFailed(host.name, ConnectFailed("no route", host=host.name)))
                return
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
            self.tell(on.HostConnected(host.name))
            self.hear(host, on.HostReady(host.name, facts))
            self.hear(host, on.RendezvousReached(host.name, "10.0.0.100"))

        self.at(12.0 if host.is_slow else 0.1 + self.delay(), connected)

    def _probe(self, host: SimHost, target: SimHost, addresses: list[str]) -> None:
        assert target.name != host.name
        if target.reachable:
            for address in addresses:
                self.hear(host, on.HostProbed(host.name, target.name, address))
        self.hear(host, on.HostProbed(host.name, target.name, None))

    def _release(self, host: SimHost) -> None:
        if host.link == "closing" or (self.is_catching_up and host.link == "none"):
            return
        assert host.link == "ready", f"{host.name} was released and is {host.link}"
        if host.reachable:
            self.all_die(host)
        host.link = "closing"
        self.hear(host, on.HostClosed(host.name))

    def _abandon(self, host: SimHost) -> None:
        assert host.link != "none" or self.is_catching_up, f"{host.name} was abandoned and has no connection"
        host.link = "none"
        agent = host.agent
        self.at(LEASE, lambda: self.all_die(host, agent))

    def all_die(self, host: SimHost, agent: int | None = None) -> None:
        """The agent, the guardian or the lack of power ends all that is there."""
        for one in host.processes:
            if agent is None or one.agent == agent:
                one.live = False
        host.processes = [one for one in host.processes if one.live]

    def gone(self, host: SimHost, agent: int) -> None:
        """The driver notices that the agent is gone, or that it is silent."""
        if host.agent == agent and host.link != "none":
            was_ready = host.link in ("ready", "closing")
            host.link = "none"
            error = HostLost("lost", host=host.name)
            self.tell(on.HostGone(host.name, error) if was_ready else on.HostFailed(host.name, error))

    # Workers

    def _start(self, start: do.Start) -> None:
        host = self.hosts[start.host]
        if host.link != "ready" or not host.is_up:
            return
        new = []
        for place, slot, count in zip(start.places, start.slots, start.starts, strict=True):
            if host.refusals:
                host.refusals -= 1
                refused = on.WorkerNotStarted(host.name, start.round, slot, 127, "no such command", count)
                self.hear(host, refused)
                continue
            one = Process(host, slot, count, start.round, host.agent)
            if self.kind == "unmodified":
                one.place, one.round = place, start.round
                self.rounds.setdefault(start.round, []).append(one)
            new.append(one)
            host.processes.append(one)
            self.at((20.0 if host.is_slow else 0.5) + self.delay(2), lambda one=one: self._imported(one))  # type: ignore[misc]
            self.at(BEAT, lambda one=one: self._beat(one))  # type: ignore[misc]
        for one in new:
            self.hear(host, on.WorkerStarted(host.name, start.round, one.slot, 1, one.start))

    def _imported(self, one: Process) -> None:
        if not one.live or one.is_silent:
            return
        if one.host.is_bad:
            self._fail(one, 1)
        elif self.kind == "in-process":
            self._ask(one)
        else:
            one.commit = self.checkpoint
            one.is_waiting = True
            self._arrived(one.born)

    def _ask(self, one: Process) -> None:
        one.round, one.is_waiting = None, True
        event = on.WorkerAsked(one.host.name, one.slot, one.start, one.last_round, one.commit)
        self._tell_over_http(one, event)

    def _tell_over_http(self, one: Process, event: on.Event) -> None:
        def deliver() -> None:
            if not one.live:
                return
            if not one.host.reachable:
                self.at(1.0, deliver)
                return
            self.tell(event)

        self.at(self.delay(), deliver)
        if self.random.random() < 0.05:
            self.at(self.delay(3), deliver)

    def _beat(self, one: Process) -> None:
        if self.kind == "in-process" and one.live and self.result is None:
            if not one.is_silent:
                event = on.WorkerBeat(one.host.name, one.slot, one.start, one.commit)
                if one.host.reachable:
                    self.tell(event)
            self.at(BEAT, lambda: self._beat(one))

    def find(self, name: str, slot: int, start: int) -> Process | None:
        found = (one for one in self.hosts[name].processes if (one.slot, one.start) == (slot, start))
        return next(found, None)

    def _when_told(self, name: str, slot: int, start: int, call: Callable[[Process], None]) -> None:
        """Workers watch their keys, but for those that hang."""
        one = self.find(name, slot, start)

        def told() -> None:
            if one is None or not one.live or one.is_silent:
                return
            if not one.host.reachable:
                self.at(1.0, told)
                return
            call(one)

        self.at(self.delay(), told)

    def _place(self, action: do.Place) -> None:
        one = self.find(action.host, action.slot, action.start)
        if one is None:
            return
        self.rounds.setdefault(action.round, []).append(one)
        one.place, one.last_round = action.place, action.round

        def told(one: Process) -> None:
            if one.last_round == action.round and one.is_waiting:
                one.is_waiting = False
                one.round = action.round
                self._arrived(action.round)
                if action.round in self.broken:
                    self._leave(one, action.round)

        self._when_told(action.host, action.slot, action.start, told)
        if self.kills_while_placing:
            self.kills_while_placing -= 1
            self.end(one, None, signal.SIGKILL)

    def _arrived(self, number: int) -> None:
        """When all are there, they take the newest state and train."""
        members = self.rounds[number]
        waiting_for = [one for one in members if one.round != number or one.commit < self.checkpoint]
        if self.kind == "in-process":
            waiting_for = [one for one in members if one.round != number]
        elif any(not one.is_waiting for one in members):
            return
        if waiting_for or any(not one.live for one in members):
            return
        newest = max(one.commit for one in members)
        for one in members:
            one.commit = newest
        self.at(STEP * self.random.random(), lambda: self._train(number))

    def _train(self, number: int) -> None:
        members = self.rounds[number]
        if any(not one.live or one.is_silent or one.round != number for one in members):
            return
        if any(not one.host.reachable for one in members):
            self.at(1.0, lambda: self._train(number))
            return
        for one in members:
            one.commit += 1
        self.checkpoint = max(self.checkpoint, members[0].commit)
        if self.kind == "in-process":
            for one in members:
                self.tell(on.WorkerBeat(one.host.name, one.slot, one.start, one.commit))
        if members[0].commit >= self.goal:
            for one in members:
                self.at(self.delay(1), lambda one=one: self._finished(one))  # type: ignore[misc]
        elif number in self.changing:
            for one in members:
                one.is_stuck = one.is_stuck and not all(peer.is_stuck for peer in members)
                self._leave(one, number)
        else:
            self.at(STEP * (0.5 + self.random.random()), lambda: self._train(number))

    def _finished(self, one: Process) -> None:
        if one.live and not one.is_silent:
            self.ended_well += 1
            self.end(one, 0)

    def _leave(self, one: Process, number: int) -> None:
        """Leave a round that has ended, and ask again."""
        if one.live and not one.is_silent and not one.is_stuck and one.round == number:
            if self.kind == "in-process":
                self._ask(one)
            else:
                self._fail(one, 1)

    def _fail(self, one: Process, code: int) -> None:
        if one.live:
            self.codes.add(code)
            self.end(one, code)

    def end(self, one: Process, code: int | None, number: int | None = None) -> None:
        """The process ends; its peers may notice, and its agent tells."""
        if not one.live:
            return
        one.live = False
        one.host.processes.remove(one)
        self.hear(
            one.host,
            on.WorkerExited(one.host.name, one.born, one.slot, code, number, self.now, start=one.start),
        )
        if one.round is not None and code != 0:
            for peer in self.rounds.get(one.round, ()):
                if peer is not one and self.random.random() < 0.6:
                    self.at(self.delay(), lambda peer=peer: self._leave(peer, one.round or 0))  # type: ignore[misc]

    def _stop(self, host: SimHost, steps: list[do.Step], slots: object) -> None:
        if host.link != "ready" or not host.reachable:
            return
        for one in list(host.processes):
            if one.agent == host.agent and (slots is None or one.slot in slots):  # type: ignore[operator]
                one.orders += 1
                for step in steps:
                    call = partial(self._signal, one, step.signal, one.orders)
                    self.at(step.after, call) if step.after else call()

    def _signal(self, one: Process, number: int, orders: int) -> None:
        if not one.live or one.orders != orders or not one.host.is_up:
            return
        if number == signal.SIGKILL or (not one.is_silent and self.random.random() < 0.8):
            self.end(one, None, number)

    # The pool

    def discover(self) -> None:
        """The script has another answer."""
        for name, host in self.hosts.items():
            if name in self.listing:
                host.unlisted_since = None
            elif host.unlisted_since is None:
                host.unlisted_since = self.now
        self.tell(on.HostsDiscovered(self._hosts()))

    def fail_discovery(self) -> None:
        self.tell(on.DiscoveryFailed(DiscoveryFailed("discover: ended with status 1")))
