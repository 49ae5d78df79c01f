"""A world for elastic jobs with faulty hosts, agents, workers and pool.

It carries out the engine's actions like real agents and workers, with delays chosen by the seed. Faults are planned
beforehand and healed in the end. So a job must end well unless one of its faults is a reason for another end.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.errors import ConnectFailed, DiscoveryFailed, HostLost
from hvlaunch.job import ElasticOptions, Host, JobSpec
from tests.simulation.elastic_workers import Process, Workers
from tests.simulation.faults import LATE, PULSES, plan_faults
from tests.simulation.invariants import Invariants
from tests.simulation.laws import LAWS, Law
from tests.simulation.ledger import Ledger
from tests.simulation.play import QUIET, Play, facts

__all__ = ["ElasticWorld", "SimHost"]

_SEEN = (
    on.HostsDiscovered,
    on.DiscoveryFailed,
    on.WorkerExited,
    on.Interrupted,
    on.UserSignal,
    on.StacksTaken,
)
"""Events that laws check even without actions."""
MOST_STEPS = 6000
_TRIES = (1.0, 2.0, 2.0)
"""Seconds between attempts of TCP to connect."""

SUSPECTED = 1.5
"""Seconds of silence after which a host is suspected."""
_PORT_KEPT = 0.3
"""Seconds until rank 0's agent keeps another port."""

Kind = Literal["in-process", "unmodified"]


@dataclass(eq=False)
class SimHost:
    name: str
    number: int
    slots: int
    is_up: bool = True
    is_cut: bool = False
    whole_since: float = 0.0
    """Newest time of an obstacle to its closing: a cut link, output that is not read, a worker that survives SIGKILL."""
    is_bad: bool = False
    """True if its workers die soon after their start."""
    is_slow: bool = False
    is_quiet: bool = False
    """True if the driver knows that it is silent."""
    is_suspected: bool = False
    """True if the driver has said that it gives no sign of life."""
    dead: int = -1
    """Number of the agent that died in a power loss."""
    killed: int = -1
    """Number of an agent that was killed; its port refuses connections before the driver knows."""
    link: str = "none"
    agent: int = 0
    """Number of connections so far."""
    heard_until: float = 0.0
    queue: list[on.Event] = field(default_factory=list)
    """Messages from the agent that the driver has not read yet."""
    parting: int = -1
    """Number of the agent that ends by itself: it starts no more workers."""
    staying: int = -1
    """Number of an agent that answers pings, and neither ends nor does anything else."""
    is_full: bool = False
    """True if its output is not read, so that later messages wait behind it."""
    refusals: int = 0
    """Number of starts that will fail."""
    processes: list[Process] = field(default_factory=list)
    unlisted_since: float | None = None
    master_port: int = 2
    """The newest port of its agents for rank 0."""
    had: int = 0
    """Slots at the beginning."""

    def __post_init__(self) -> None:
        self.had = self.slots

    @property
    def is_dead(self) -> bool:
        """True if its agent died in a power loss, also after power is back."""
        return self.dead == self.agent

    @property
    def reachable(self) -> bool:
        return self.is_up and not self.is_cut and not self.is_dead


class ElasticWorld(Play):
    """Plays one elastic job to its end."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, most_steps=MOST_STEPS)
        self._begins_empty = seed % 8 == 0
        self.is_mute = seed % 64 == 1
        """True if no list of hosts ever comes."""
        rng = self.random
        self.kind: Kind = "in-process" if rng.random() < 0.7 else "unmodified"
        self.hosts = {
            name: SimHost(name, number, rng.randint(1, 3))
            for number, name in enumerate("abcde"[: rng.randint(1, 5)], 1)
        }
        self.listing = [name for name in self.hosts if rng.random() < 0.8] or ["a"]
        self.options = self._options()
        apart = random.Random(f"{seed} restarts")  # so that the other choices of each seed stay as they are
        if apart.random() < 0.25:
            self.options = replace(self.options, restart_window=apart.choice([5.0, 20.0]))
        self.spec = JobSpec(
            command=("train",),
            hosts=() if self.options.discovers else tuple(self._hosts()),
            cwd="/",
            grace=2.0,
            start_timeout=10.0,
            lease=20.0 if seed % 3 == 2 else 5.0,
            on_hang="restart",
            elastic=self.options,
        )
        self.suspects = random.Random(f"{seed} suspicion").random() < 0.7
        """True for a job with --suspect-after."""
        self.workers = Workers(self, goal=rng.randint(3, 14))
        self.faults: list[str] = []
        self.faults_detail = ""
        self.asleep_since = self.asleep_until = self.beats_from = 0.0
        self.is_catching_up = False
        """True if the driver has old messages to read."""
        self._missed: list[tuple[on.Event, SimHost | None, int]] = []
        self.cut_pairs: set[frozenset[str]] = set()
        """Pairs of hosts that can't reach each other."""
        self.healed_pairs: set[frozenset[str]] = set()
        """Pairs that could not reach each other a moment ago."""
        self.faulty: set[str] = set()
        """Hosts that had a fault."""
        self.engine = Engine(self.spec, 4711)
        self.invariants = Invariants(self)
        self.ledger = Ledger(self.kind)
        if not self.options.discovers:
            self.ledger.list_all([(host.name, host.slots or 0) for host in self.spec.hosts])
        self.laws = [law(self) for law in LAWS]
        self._turns = [law.turn for law in self.laws if type(law).turn is not Law.turn]
        self._afters = [law.after for law in self.laws if type(law).after is not Law.after]

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

    # The engine

    @property
    def deadline(self) -> float | None:
        return None if self.is_asleep else super().deadline

    def delay(self, most: float = 0.2) -> float:
        """Return a delay, short in most cases."""
        return self.random.random() * most * (1 if self.random.random() < 0.95 else 10)

    def begin(self) -> None:
        plan_faults(self)
        self.tell(on.Began())
        if self.options.discovers and self._begins_empty:
            self.tell(on.HostsDiscovered(()))
            self.at(1.0, self.discover)
        elif self.options.discovers:
            self.discover()

    def tell(self, event: on.Event) -> None:
        if self.result is not None:
            return
        if self.is_asleep:
            host = self.hosts.get(getattr(event, "host", ""))
            self._missed.append((event, host, host.agent if host is not None else 0))
            return
        super().tell(event)
        if not isinstance(event, on.WorkerBeat):
            self.invariants.after()

    def handle(self, event: on.Event) -> list[do.Action]:
        actions = super().handle(event)
        self.ledger.hear(event, self.now)
        self.invariants.before(actions)
        if actions or not isinstance(event, QUIET):
            if actions or isinstance(event, _SEEN):
                for turn in self._turns:
                    turn(event, actions)
                self.ledger.note(actions)
            for after in self._afters:
                after()
            finish = next((action for action in actions if isinstance(action, do.Finish)), None)
            if finish is not None:
                for law in self.laws:
                    law.end(finish.result)
        return actions

    @property
    def is_asleep(self) -> bool:
        return self.now < self.asleep_until

    @property
    def is_late(self) -> bool:
        """True if the driver is stopped, or has old messages to read."""
        return self.is_catching_up or self.is_asleep

    def wake_up(self) -> None:
        """Read the messages of the time in which the driver was stopped, unless it was stopped again."""
        if self.is_asleep:
            return
        missed, self._missed = self._missed, []
        self.is_catching_up = True
        late = self.now - self.asleep_since - self.spec.lease / PULSES
        self.asleep_since = self.now
        if late > LATE:
            self.tell(on.DriverStopped(late))
        for event, host, agent in missed:
            if host is None or host.agent == agent:  # else it is news of an earlier connection
                self.tell(event)
        self.is_catching_up = False

    def carry_out(self, action: do.Action) -> None:
        match action:
            case do.Connect(host):
                self._connect(self.hosts[host.name])
            case do.Release(name):
                self._release(self.hosts[name], action)
            case do.Abandon(name):
                self._abandon(self.hosts[name])
            case do.Probe() | do.Start() | do.Stop() | do.Signal():
                self.order(action)
            case _:
                self.workers.carry_out(action)

    def order(self, action: do.Probe | do.Start | do.Stop | do.Signal | do.Release) -> None:
        """Send the action to its host's agent."""
        self.obey(action)

    def obey(self, action: do.Action) -> None:
        """Carry out an order as an agent does."""
        match action:
            case do.Probe():
                self._probe(action)
            case do.Release(name):
                self._end_agent(self.hosts[name])
            case do.Start() if self.kind == "unmodified" and not action.launches[0].place.rank:
                self.workers.carry_out(action)
                self._keep_another_port(self.hosts[action.host])
            case _:
                self.workers.carry_out(action)

    # Hosts

    def _keep_another_port(self, host: SimHost) -> None:
        """Let rank 0's agent report its next port: the round took the one that it kept."""
        host.master_port += 1
        report, agent = on.MasterPort(host.name, host.master_port), host.agent
        self.at(_PORT_KEPT, lambda: self.tell(report) if host.agent == agent and host.reachable else None)

    def hear(self, host: SimHost, event: on.Event, agent: int | None = None) -> None:
        """Deliver an agent's message in order, as long as the connection lasts; by default from the newest agent.

        If the host's output is not read, other messages overtake ends of workers, which wait behind the output.
        """
        if agent is not None and agent != host.agent:
            return
        agent = host.agent
        host.heard_until = max(host.heard_until, self.now + self.delay())
        host.queue.append(event)

        def deliver() -> None:
            if host.agent != agent or host.link == "none" or not host.is_up or host.is_dead:
                return
            waits = (on.WorkerExited, on.HostClosed) if host.is_full else ()
            event = next((message for message in host.queue if not isinstance(message, waits)), None)
            if host.is_cut or event is None:
                self.at(0.5, deliver)
                return
            host.queue.remove(event)
            if isinstance(event, on.HostClosed):
                self.all_die(host, agent)
                host.link = "none"
            self.tell(event)
            if self.random.random() < 0.05:
                self.at(self.delay(2), lambda: self.tell(event) if host.agent == agent else None)

        self.at(host.heard_until - self.now, deliver)

    def _connect(self, host: SimHost) -> None:
        assert host.link == "none", f"{host.name} is connected twice"
        host.link = "connecting"
        host.agent += 1
        host.queue = []
        agent = host.agent
        host.heard_until = self.now

        def connected() -> None:
            if host.agent != agent or host.link != "connecting":
                return
            if not host.reachable:
                host.link = "none"
                self.tell(on.HostFailed(host.name, ConnectFailed("no route", host=host.name).problem))
                return
            host.link = "ready"
            self.tell(on.HostConnected(host.name))
            self.hear(host, on.HostReady(host.name, self._facts(host)))
            self.hear(host, on.RendezvousReached(host.name, "10.0.0.100"))

        self.at(12.0 if host.is_slow else 0.1 + self.delay(), connected)

    def _facts(self, host: SimHost) -> on.HostFacts:
        return facts(host.number)._replace(master_port=host.master_port)

    def _probe(self, probe: do.Probe) -> None:
        host, target, agent = self.hosts[probe.host], self.hosts[probe.target], self.hosts[probe.host].agent
        assert target.name != host.name

        def found(address: str | None) -> None:
            self.hear(host, on.HostProbed(host.name, target.name, address, probe.agent), agent)

        def try_all(pauses: Sequence[float]) -> None:
            has_agent = target.agent not in (target.dead, target.killed)
            pair = frozenset((host.name, target.name))
            is_refused = (target.is_up and not has_agent) or pair in self.cut_pairs
            is_cut = not (host.reachable and target.reachable)
            if is_cut and not is_refused and pauses:
                self.at(pauses[0], lambda: try_all(pauses[1:]))
                return
            if not (is_refused or is_cut):
                for address in probe.addresses:
                    found(address)
            found(None)

        try_all(_TRIES)

    def _release(self, host: SimHost, action: do.Release) -> None:
        if host.link == "closing" or (self.is_catching_up and host.link == "none"):
            return
        assert host.link == "ready", f"{host.name} was released and is {host.link}"
        host.link = "closing"
        self.order(action)

    def _end_agent(self, host: SimHost) -> None:
        if host.reachable:
            self.all_die(host)
        if host.staying != host.agent:
            self.hear(host, on.HostClosed(host.name))

    def _abandon(self, host: SimHost) -> None:
        assert host.link != "none" or self.is_catching_up, f"{host.name} was abandoned and has no connection"
        host.link = "none"
        agent = host.agent
        self.at(self.spec.lease, lambda: self.all_die(host, agent))

    def all_die(self, host: SimHost, agent: int | None = None) -> None:
        """End everything on the host, as agent, guardian or a power loss do."""
        for process in host.processes:
            if agent is None or process.agent == agent:
                process.live = False
        host.processes = [process for process in host.processes if process.live]

    def gone(self, host: SimHost, agent: int) -> None:
        """Tell the driver that the agent is gone or silent."""
        if host.agent == agent and host.link != "none":
            was_ready = host.link in ("ready", "closing")
            host.link = "none"
            error = HostLost("lost", host=host.name).problem
            self.tell(on.HostGone(host.name, error) if was_ready else on.HostFailed(host.name, error))
        self.notice(host)

    def notice(self, host: SimHost) -> None:
        """Tell the driver whether pings are answered; a lost host gets none."""
        is_quiet = host.link == "ready" and not host.reachable
        if is_quiet != host.is_quiet:
            host.is_quiet = is_quiet
            host.is_suspected = False
            self.tell(on.HostQuiet(host.name) if is_quiet else on.HostAnswers(host.name))
            if is_quiet and self.suspects:
                since = self.now
                self.at(SUSPECTED, lambda: self.suspect(host, since))

    def suspect(self, host: SimHost, since: float | None = None) -> None:
        """Suspect a host that has been quiet since then; None for a false suspicion, which ends soon."""
        if host.is_suspected or host.link != "ready" or (since is not None and not host.is_quiet):
            return
        host.is_suspected = True
        if since is None:
            host.is_quiet = True
            self.tell(on.HostQuiet(host.name))
        self.tell(on.HostSuspected(host.name, SUSPECTED))
        if since is None:
            self.at(3.0 * random.Random(f"{self.seed} {self.now}").random(), lambda: self.notice(host))

    # The pool

    def discover(self) -> None:
        """Give the driver the script's newest list."""
        for name, host in self.hosts.items():
            if name in self.listing:
                host.unlisted_since = None
            elif host.unlisted_since is None:
                host.unlisted_since = self.now
        if not self.is_mute:
            self.tell(on.HostsDiscovered(tuple(self._hosts())))

    def fail_discovery(self) -> None:
        self.tell(on.DiscoveryFailed(DiscoveryFailed("discover: ended with status 1").problem))
