"""The driver's ends of its sessions, with each present or earlier agent.

They behave like hvlaunch/driver/links/session.py.
"""

from collections import deque
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.frames import BY_AGENT, BY_DRIVER, LASTING, BadFrame, Session, StaleEpoch
from hvlaunch.driver.links.session import AckedFrames
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from tests.simulation.wires import Agent, Frame, Wire

if TYPE_CHECKING:
    from tests.simulation.wired import Wired

__all__ = ["ORDERS", "REPORTS", "Link"]

ORDERS: dict[type, str] = {
    do.Probe: "probe",
    do.Start: "start",
    do.Stop: "stop",
    do.Signal: "signal",
    do.Release: "bye",
}
REPORTS: dict[type, str] = {
    on.HostReady: "hello",
    on.RendezvousReached: "reached",
    on.HostProbed: "probed",
    on.WorkerStarted: "started",
    on.WorkerNotStarted: "not_started",
    on.WorkerExited: "exited",
    on.WorkerAlone: "alone",
    on.WorkerSuspended: "suspended",
    on.MasterPort: "master_port",
    on.HostParting: "parting",
    on.HostClosed: "bye",
}
_PAUSE = 0.3


class Link:
    """`epoch` is its driver's. A link is over when its agent is gone or given up."""

    def __init__(self, world: "Wired", host: str, epoch: int) -> None:
        self._world = world
        self.host = host
        self.epoch = epoch
        self.session: Session = world.make_session(BY_DRIVER, BY_AGENT, epoch)
        self.acked = AckedFrames()
        self.agent = 0
        """Number of the agent, as far as the journal knows."""
        self.wire: Wire | None = None
        self.is_over = False
        self.bye: tuple[int, Frame] | None = None
        """The agent's last frame, which counts once its end is seen, or it can't be reached any more."""
        self.is_released = False
        """True if the agent was told to end."""
        self.unprinted: deque[int] = deque()
        """Output frames that wait for the printer."""
        self.candidate: Wire | None = None
        self._next = 1
        """Number of the next frame on this connection."""
        self._heard: set[int] = set()
        """Frames that have come and may not be acked yet, by number."""
        self._away_since = 0.0
        self.send(Frame("hello"))

    def send(self, frame: Frame) -> None:
        """Send now, or over the next connection."""
        if frame.kind == "bye":
            self.is_released = True
            self._acknowledge_all()
        self.session.sending(frame.kind, frame)
        if self.wire is not None:
            self.wire.put("agent", frame)

    def open(self, agent: Agent, wire: Wire) -> None:
        """Begin the session over the connection that started the agent."""
        self.agent = agent.number
        self.wire = wire
        wire.readers["driver"] = lambda frame: self._hear(wire, frame)
        for frame in self.session.again([0, 0]):
            wire.put("agent", frame)

    @property
    def is_dead(self) -> bool:
        """True if its driver is dead."""
        return not self._world.is_driven_by(self.epoch)

    @property
    def is_idle(self) -> bool:
        return self.is_over or self.is_dead

    def _hear(self, wire: Wire, frame: Frame) -> None:
        if self.is_idle or wire not in (self.wire, self.candidate):
            return
        if frame.kind == "end" and self.bye is not None:
            self._end()
        elif frame.kind == "end":
            self.lose(wire)
        elif frame.kind == "resumed":
            self._go_on(wire, frame.body)
        elif frame.kind == "have":
            self.session.taken(frame.body)
        else:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        number, self._next = self._next, self._next + 1
        if number in self._heard or number in self.acked:
            return
        self._heard.add(number)
        self.session.received(frame.kind, 1)
        if frame.kind == "bye":
            self.bye = number, frame
            if self._world.breakdowns.kills_at("bye"):
                self._world.die()
                return
            self._acknowledge_all()
        else:
            self._world.take(self, number, frame)
        if self._world.random.random() < 0.5:
            self.acknowledge()

    def done(self, number: int) -> None:
        """Note a acked frame. An agent that was told to end waits for that."""
        self.acked.add(number)
        if self.is_released:
            self._acknowledge_all()

    def _acknowledge_all(self) -> None:
        """Acknowledge at once if everything before the agent's last frame is acked."""
        if self.acked.prefix >= self._next - 1 - (self.bye is not None):
            self.acknowledge()

    def acknowledge(self) -> None:
        """Tell the agent what it need not keep."""
        if self.wire is not None and not self.is_dead:
            self.wire.put("agent", Frame("have", self.have()))

    def have(self) -> list[int]:
        """Frames that the agent need not keep."""
        return [self.acked.prefix, self.session.have[1]]

    # Another connection

    def lose(self, wire: Wire) -> None:
        """Note the seen end of this connection."""
        if self.is_idle or wire not in (self.wire, self.candidate):
            return
        if wire is self.candidate:
            self.candidate = None
            self._world.at(_PAUSE, self._try)
            return
        self.wire = None
        self.renew()
        self._world.tell(on.HostAway(self.host, "it broke"))

    def renew(self) -> None:
        """Connect again, as long as it makes sense."""
        self._away_since = self._world.now
        self._world.at(self._world.travel(), self._try)

    def _try(self) -> None:
        if self.is_idle or self.wire is not None or self.candidate is not None:
            return
        agent = self._world.agents[self.host, self.agent]
        away = self._world.now - self._away_since
        if not self._world.reaches(self.host):
            self._again_or_give_up(away < self._world.lease)
        elif self._world.refuses(self.host):
            self._again_or_give_up(away < self._world.reconnect)
        elif not agent.is_alive:
            self._again_or_give_up(False)
        else:
            self._shake_hands(agent)

    def _again_or_give_up(self, again: bool) -> None:
        if again:
            self._world.at(_PAUSE, self._try)
        else:
            self._end()

    def _end(self) -> None:
        """End the link: its agent is gone or unreachable."""
        if self.bye is not None:
            self._world.take(self, *self.bye)
        else:
            self._world.lost(self)

    def _shake_hands(self, agent: Agent) -> None:
        wire = Wire(self._world, self.host)
        wire.readers["driver"] = lambda frame: self._hear(wire, frame)
        have = self.have()
        before = agent.wire
        try:
            agent.admit(wire, self.epoch, have)
        except (StaleEpoch, BadFrame) as error:
            self._world.history.append(f"{self._world.now:7.2f} *** {agent} refuses: {error}")
            self._world.lost(self)
            return
        if before is not None:
            before.cut("driver")
        self._next = have[LASTING] + 1
        self.candidate = wire
        self._world.may_break(self, agent, wire)

    def _go_on(self, wire: Wire, have: list[int]) -> None:
        """Continue: the agent has this many of our frames."""
        self.candidate = None
        self.wire = wire
        for frame in self.session.again(have):
            wire.put("agent", frame)
        self._world.tell(on.HostBack(self.host, self._world.now - self._away_since))
