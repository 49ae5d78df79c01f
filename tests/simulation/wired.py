"""A world whose driver may be killed, and whose connections to agents may be lost.

The driver writes each turn into its journal, carries it out, and acknowledges the frame; a successor replays the journal.
Everything else that a driver knows is lost with it.
"""

from __future__ import annotations

from typing import Any

from hvlaunch.agent.wire.frames import Session
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import replay
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.hosts import HostState
from hvlaunch.job import JobResult
from tests.simulation.breakdowns import Breakdowns
from tests.simulation.continuity import Continuity
from tests.simulation.journals import Journal, Origin
from tests.simulation.links import ORDERS, REPORTS, Link
from tests.simulation.play import Play
from tests.simulation.snapshots import snapshot
from tests.simulation.wires import Agent, Frame, Wire

__all__ = ["Killed", "Wired"]

_HTTP = (on.WorkerAsked, on.WorkerBeat)
_TOLD = (do.Assign, do.Leave, do.Break, do.Change)
_RENDEZVOUS = "the rendezvous"
_SLACK = 1.0


class Killed(Exception):
    """The driver is killed now."""


class Wired(Play):
    """Mixin for World or ElasticWorld; stands before them among the bases."""

    lease = 5.0
    agents_lease = 7.0
    grace = 2.0
    make_session: type[Session] = Session
    make_journal = Journal

    def plug_in(self, breakdowns: Breakdowns) -> None:
        """Set up connections and journal, once the rest of the world is complete."""
        self.breakdowns = breakdowns
        self.reconnect = breakdowns.reconnect
        self.continuity = Continuity(self)
        self.agents: dict[tuple[str, int], Agent] = {}
        self.links: dict[str, Link] = {}
        """The driver's ends, by host."""
        self.epoch = 1
        self.died_at = 0.0
        self.journal = self.make_journal(self.spec)
        self.printed: dict[tuple[str, int], list[int]] = {}
        """Numbers of printed output frames by agent, which are on record."""
        self._origin: Origin | None = None
        self._acts_left: int | None = None
        self._is_clean = True
        """True if the engine has seen nothing beyond the journal."""
        self._told: set[str] = set()
        """Messages for workers at the rendezvous."""
        self._puts: dict[tuple[str, ...], tuple[int, on.Event]] = {}
        """The newest message of each kind that workers left at the rendezvous, with its version."""
        self._version = 0
        self._unheard: dict[tuple[str, ...], on.Event] = {}
        """Messages that workers retry while no driver listens."""
        breakdowns.plan(self)

    # What the rest of the world has to say

    def reaches(self, host: str) -> bool:
        """True if the network reaches the host."""
        return True

    def is_held(self, host: str, end: str, frame: Frame) -> bool:
        """True if this frame has to wait."""
        return False

    @property
    def living(self) -> list[str]:
        """Names of living workers."""
        raise NotImplementedError

    def agent_gives_up(self, agent: Agent) -> None:
        """End the agent's workers and itself, within the grace."""
        raise NotImplementedError

    def reopen(self, host: str) -> None:
        """Start another agent on a host whose agent the journal did not know."""
        raise NotImplementedError

    def returned(self, states: dict[str, HostState]) -> None:
        """Note that another driver took over, with these states of its hosts."""
        raise NotImplementedError

    # Connections

    def travel(self) -> float:
        """Return the travel time of a frame."""
        return self.random.random() * (0.02 if self.random.random() < 0.95 else 0.3)

    def is_read(self, agent: Agent, wire: Wire) -> bool:
        """True if the agent still reads this connection."""
        return agent.wire is wire

    def refuses(self, host: str) -> bool:
        return self.breakdowns.refuses(host, self.now)

    def is_long_unaware(self, host: str) -> None:
        """Note that the driver hears nothing of this host from now on, and learns the reason later."""

    def may_break(self, link: Link, agent: Agent, wire: Wire) -> None:
        """Break a connection that is being made, by chance."""
        self.breakdowns.may_break(self, link, agent, wire)

    def is_driven_by(self, epoch: int) -> bool:
        return self.is_driven and self.epoch == epoch

    def greeted(self, host: str, number: int) -> None:
        """Note that an agent was started over a connection."""
        if self.is_driven:
            wire = Wire(self, host)
            agent = self.agents[host, number] = Agent(self, host, number, wire)
            self.links[host].open(agent, wire)

    def report(self, host: str, number: int, event: on.Event) -> None:
        """Send an agent's report, sometimes after a worker's output."""
        agent = self.agents.get((host, number))
        if agent is None:
            return
        if isinstance(event, on.HostReady):
            event = on.HostReady(host, event.facts._replace(scratch=str(number)))
        elif isinstance(event, on.WorkerExited) or self.random.random() < 0.1:
            agent.say(Frame("output", len(agent.sent)))
        agent.say(Frame(REPORTS[type(event)], event))
        if isinstance(event, on.HostClosed):
            agent.part()

    def obey_frame(self, agent: Agent, frame: Frame) -> None:
        """Carry out an order from a frame."""
        if frame.body is not None:
            self.obey(frame.body)  # type: ignore[attr-defined]

    # The driver

    def order(self, action: Any) -> None:
        """Send the action to its host's agent."""
        self.links[action.host].send(Frame(ORDERS[type(action)], action))

    def take(self, link: Link, number: int, frame: Frame) -> None:
        """Handle a frame that came for the first time."""
        if frame.kind == "output":
            link.unprinted.append(number)
            self.at(self.travel(), lambda: None if link.is_dead else self._print(link))
            return
        event = frame.body
        self._tell_as(Origin(link.host, link.agent, number), event)

    def _print(self, link: Link) -> None:
        number = link.unprinted.popleft()
        self.printed.setdefault((link.host, link.agent), []).append(number)
        self.continuity.printed(link.host, link.agent, number)
        link.done(number)

    def _tell_as(self, origin: Origin | None, event: on.Event) -> None:
        self._origin = origin
        try:
            self.tell(event)
        finally:
            self._origin = None

    def tell(self, event: on.Event) -> None:
        if self.result is not None:
            return
        if isinstance(event, _HTTP) and self._origin is None:
            self._put(event)
        elif self.is_driven:
            try:
                super().tell(event)
                if self._acts_left is not None:
                    raise Killed  # noqa: TRY301 (as in the middle of it)
            except Killed:
                self.die()

    def _put(self, event: Any) -> None:
        """Store a worker's message at the rendezvous, durable before its answer."""
        key = (type(event).__name__, event.host, str(event.slot), str(event.start))
        if not self.is_driven:
            self._unheard[key] = event
            return
        self._version += 1
        self._puts[key] = self._version, event
        if not self.breakdowns.kills_at("put"):
            self._tell_as(Origin(_RENDEZVOUS, 0, self._version), event)
        else:
            self.die()

    def keep(self, event: on.Event, actions: list[do.Action]) -> None:
        kill = self.breakdowns.kill_in_turn(actions)
        if kill == "before":
            self._is_clean = False
            raise Killed
        self.journal.write(self.now, event, actions, self._origin)
        if kill == "torn":
            self._is_clean = False
            self.journal.tear(self.random.random())
            raise Killed
        if self.engine.is_idle:
            self.journal.fold(self.engine.idle_summary())
        self.continuity.kept(event, actions, self._origin)
        self._acts_left = kill if isinstance(kill, int) else None
        self._note(event, actions, self._origin)

    def _note(self, event: on.Event, actions: list[do.Action], origin: Origin | None) -> None:
        """Apply a turn to the connections, in the job or in a replay."""
        link = self.links.get(getattr(event, "host", ""))
        if origin is not None and link is not None and origin.host == link.host:
            link.done(origin.number)
            if isinstance(event, on.HostReady):
                link.agent = origin.agent
        if link is not None and isinstance(event, on.HostGone | on.HostFailed | on.HostClosed):
            link.is_over = True
        for action in actions:
            if isinstance(action, do.Connect):
                self.links[action.host.name] = Link(self, action.host.name, self.epoch)
            elif isinstance(action, do.Abandon) and action.host in self.links:
                self.links[action.host].is_over = True

    def act(self, action: do.Action) -> None:
        if self._acts_left == 0:
            raise Killed
        if self._acts_left is not None:
            self._acts_left -= 1
        if not isinstance(action, _TOLD):
            super().act(action)
        elif (text := repr(action)) not in self._told:  # a value that is there already changes nothing
            self._told.add(text)
            super().act(action)

    def die(self) -> None:
        """Kill the driver, with everything that it knew."""
        self.history.append(f"{self.now:7.2f} *** the driver {self.epoch} is killed")
        self._acts_left = None
        self.is_driven = False
        self.died_at = self.now
        self.breakdowns.driver_died(self)

    @property
    def deadline(self) -> float | None:
        return super().deadline if self.is_driven else None

    # A successor

    def succeed(self) -> None:
        """Let another driver take over."""
        if self.is_driven or self.result is not None:
            return
        before, entries = self.engine, self.journal.entries()
        self.epoch += 1
        self.links = {}
        records = list(self.journal.records(entries))
        self.engine = self._replayed(entries)
        if self._is_clean:
            assert snapshot(self.engine) == snapshot(before), (
                "a replayed engine is another than the one that died"
            )
        self._is_clean = True
        for turn, origin in records:
            self._note(turn.event, list(turn.actions), origin)
            for action in turn.actions:
                if type(action) in ORDERS:
                    self.order(action)
        for (host, number), printed in self.printed.items():
            link = self.links.get(host)
            if link is not None and link.agent == number:
                for frame in printed:
                    link.acked.add(frame)
        self.is_driven = True
        self.history.append(f"{self.now:7.2f} *** driver {self.epoch} takes over")
        self.breakdowns.driver_came(self)
        if not records:
            self.tell(on.Began())
            return
        self._go_on(records[-1].turn.actions, records)

    def _replayed(self, entries: list[dict[str, Any]]) -> Engine:
        return replay([entries[0], *(entry["turn"] for entry in entries[1:])])

    def _go_on(self, actions: tuple[do.Action, ...], records: list[Any]) -> None:
        states = {host.name: host.state for host in self.engine.pool}
        self.returned(states)
        try:
            for action in actions:
                if isinstance(action, (*_TOLD, do.Finish)):
                    self.act(action)
        except Killed:
            self.die()
        if self.result is not None or not self.is_driven:
            return
        before = dict(self.links)
        self.tell(on.DriverReplaced(self.now - records[-1].turn.at))
        for name, link in before.items():
            if link.is_idle or self.links[name] is not link:
                continue
            if states[name] is HostState.CONNECTING:
                self.reopen(name)
            else:
                link.renew()
        heard = max(
            (origin.number for _, origin in records if origin and origin.host == _RENDEZVOUS), default=0
        )
        for version, event in sorted(self._puts.values(), key=lambda put: put[0]):
            if version > heard:
                self._tell_as(Origin(_RENDEZVOUS, 0, version), event)
        for key in list(self._unheard):
            self.at(self.random.random(), lambda key=key: self._retry(key))  # type: ignore[misc]

    def _retry(self, key: tuple[str, ...]) -> None:
        event = self._unheard.pop(key, None)
        if event is not None and self.is_there(event):
            self.tell(event)

    def is_there(self, event: Any) -> bool:
        """True if the worker of this message still lives."""
        return True

    def lost(self, link: Link) -> None:
        """Handle a link without hope of another connection."""
        agent = self.agents[link.host, link.agent]
        must_be_found = self.breakdowns.is_gentle and self.reaches(link.host)
        assert not (must_be_found and agent.is_alive), f"{agent} lives, and is lost"
        if self.engine.pool[link.host].state is HostState.CLOSING and not agent.is_alive:
            self.close(link)
        else:
            self.give_up(link)

    def check_gives_up(self, agent: Agent) -> None:
        """Check an agent that gives up: if all faults heal in time, only one that its driver gave up may."""
        link = self.links.get(agent.host)
        is_wanted = link is not None and link.agent == agent.number and not link.is_over
        may = self.result is not None or not self.breakdowns.is_gentle
        assert may or not is_wanted, f"{agent} gives up, and its driver was there in time"

    def close(self, link: Link) -> None:
        """Handle the end of an agent that was told to end."""
        raise NotImplementedError

    def give_up(self, link: Link) -> None:
        """Handle an agent that can't be reached."""
        raise NotImplementedError

    # The end

    def run(self) -> JobResult | None:  # type: ignore[override]
        """Play to the end; None if nobody takes the job over."""
        self.begin()
        for _ in range(self._most_steps):
            if self.result is not None or self.breakdowns.is_over(self):
                break
            self.step()
        else:
            raise AssertionError("the job never ends")
        if self.result is not None:
            self._leave()
        assert not self.living, f"nobody drives the job, and {self.living} live"
        return self.result

    def _leave(self) -> None:
        """Print what has come, and end the driver; unreachable agents end when their time is over."""
        for link in self.links.values():
            while link.unprinted:
                self._print(link)
            if link.wire is not None:
                link.wire.put("agent", Frame("leave"))
        self.continuity.end()
        self.is_driven = False
        until = self.now + self.agents_lease + self.grace + _SLACK
        self.at(until - self.now, lambda: None)
        while self.living and self.now < until:
            self.step()
