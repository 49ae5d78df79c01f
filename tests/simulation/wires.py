"""Connections between a driver and an agent on the virtual clock, with the agent's end of the session.

Agents behave like hvlaunch/agent/main.py; the real Session does their counting.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvlaunch.agent.wire.frames import BY_AGENT, BY_DRIVER, LASTING, Session

if TYPE_CHECKING:
    from tests.simulation.wired import Wired

__all__ = ["Agent", "Frame", "Wire"]

_HELD = 0.5


class Frame(NamedTuple):
    """A frame. `body` is an event, an action, a worker's output, or counts."""

    kind: str
    body: Any = None


class Wire:
    """One connection to a host, with the ends "agent" and "driver". Frames to a void end are lost."""

    def __init__(self, world: "Wired", host: str) -> None:
        self._world = world
        self._host = host
        self._queues: dict[str, deque[Frame]] = {"agent": deque(), "driver": deque()}
        self._due = dict.fromkeys(self._queues, 0.0)
        self._void: set[str] = set()
        self.readers: dict[str, Callable[[Frame], None]] = {}
        """Reader of each end."""

    def put(self, end: str, frame: Frame) -> None:
        """Send to this end, in order."""
        if end not in self._void:
            self._queues[end].append(frame)
            self._due[end] = max(self._due[end], self._world.now + self._world.travel())
            self._world.at(self._due[end] - self._world.now, lambda: self._arrive(end))

    def _arrive(self, end: str) -> None:
        queue = self._queues[end]
        if not queue:
            return
        if self._world.is_held(self._host, end, queue[0]):
            self._world.at(_HELD, lambda: self._arrive(end))
            return
        frame = queue.popleft()
        if end in self.readers:
            self.readers[end](frame)

    def cut(self, *ends: str) -> None:
        """Lose everything on its way to these ends."""
        for end in ends:
            self._queues[end].clear()
            self._void.add(end)

    def end(self, end: str, nearly_there: int) -> None:
        """Close the other end: what has nearly arrived arrives, then the end is seen."""
        queue = self._queues[end]
        while len(queue) > nearly_there:
            queue.pop()
        self.put(end, Frame("end"))
        self._void.add(end)

    def is_void(self, end: str) -> bool:
        return end in self._void


class Agent:
    """One agent: its session, its connection, and its patience with its driver."""

    def __init__(self, world: "Wired", host: str, number: int, wire: Wire) -> None:
        self._world = world
        self.host = host
        self.number = number
        self.session: Session = world.make_session(BY_AGENT, BY_DRIVER)
        self.is_alive = True
        self.is_ending = False
        """True if it has given its driver up."""
        self.is_lost = False
        """True if its host is lost."""
        self.has_parted = False
        self.sent: list[Frame] = []
        """All frames that it has sent, in order: the truth."""
        self.obeyed = 0
        """Number of orders carried out."""
        self._waiting: deque[Frame] = deque()
        self._news = 0
        """Number of connections; timers of an earlier one do nothing."""
        self.wire: Wire | None = None
        self._join(wire)

    def __str__(self) -> str:
        return f"agent {self.number} of {self.host}"

    def _join(self, wire: Wire) -> None:
        self._news += 1
        self.wire = wire
        wire.readers["agent"] = lambda frame: self._hear(wire, frame)

    def say(self, frame: Frame) -> None:
        """Send a frame as soon as there is a connection."""
        if self.is_alive and not self.has_parted:
            self.sent.append(frame)
            self._waiting.append(frame)
            self._flush()

    def _flush(self) -> None:
        while self.wire is not None and self._waiting:
            frame = self._waiting.popleft()
            self.session.sending(frame.kind, frame)
            self.wire.put("driver", frame)

    def _hear(self, wire: Wire, frame: Frame) -> None:
        if not self.is_alive or not self._world.is_read(self, wire):
            return
        if frame.kind == "end":
            self.lose(wire)
        elif frame.kind == "leave":
            self.give_up()
        elif frame.kind == "have":
            self._acknowledged(frame.body)
            self.session.taken(frame.body)
            self._end_if_done()
        else:
            self._world.continuity.order(self, frame)
            self._world.obey_frame(self, frame)
            self.session.received(frame.kind, 1)
            if self._world.random.random() < 0.5:
                wire.put("driver", Frame("have", self.session.tell()))

    def _acknowledged(self, counts: Sequence[int]) -> None:
        self._world.continuity.acknowledged(self, counts[LASTING])

    def lose(self, wire: Wire) -> None:
        """Note the seen end of this connection."""
        if self.wire is wire and self.is_alive:
            self.wire = None
            self._give_up_after(self._world.reconnect)

    def miss(self, wire: Wire) -> None:
        """Lose what comes over this connection without the agent's knowledge."""
        if self.wire is wire:
            self._give_up_after(self._world.agents_lease)

    def _give_up_after(self, seconds: float) -> None:
        news = self._news
        self._world.at(seconds, lambda: self.give_up() if self._news == news else None)

    def admit(self, wire: Wire, epoch: int, have: Sequence[int]) -> None:
        """Admit a proven driver. Raises StaleEpoch or BadFrame to refuse it."""
        self.session.begin_epoch(epoch)
        self._world.continuity.admitted(self, epoch)
        self._acknowledged(have)
        again = self.session.again(have)
        self._join(wire)
        wire.put("driver", Frame("resumed", self.session.tell()))
        for frame in again:
            wire.put("driver", frame)
        self._flush()
        self._end_if_done()

    def part(self) -> None:
        """Send bye, and wait until everything before it is acked."""
        self.has_parted = True
        if self.is_ending:
            self.die()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self.has_parted and not self._waiting and self.session.kept <= 1:
            self.die()

    def give_up(self) -> None:
        """Give the driver up: end the workers, and itself."""
        if self.has_parted:
            self.die()
        elif self.is_alive and not self.is_ending:
            self.is_ending = True
            self._world.agent_gives_up(self)

    def die(self) -> None:
        """End: its last frames arrive if possible, then its end is seen."""
        if self.is_alive:
            self.is_alive = False
            self._news += 1
            if self.wire is not None:
                self.wire.put("driver", Frame("end"))
