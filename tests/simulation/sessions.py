"""Both ends of a session, over connections that are lost at any frame, and with drivers that take over.

Each end learns only what its own connection shows. The world notes apart from the sessions what each end has dealt with:
no frame may be lost, doubled or reordered, and no driver heard after a later one.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from hvlaunch.agent.wire.frames import BY_AGENT, BY_DRIVER, Session, StaleEpoch

__all__ = ["Broken", "Connection", "SessionWorld", "play"]

_ORDERS, _INPUTS = ("start", "stop", "signal"), ("stdin", "relay", "ack")
_REPORTS, _ANSWERS = ("started", "output", "exited"), ("stdin_taken", "relay")
Frame = tuple[str, Any]


class Broken(AssertionError):
    """A law that the sessions broke."""


class Connection:
    """Frames on their way. One end may have lost the connection before the other knows."""

    def __init__(self) -> None:
        self.to_agent: deque[Frame] = deque()
        self.to_driver: deque[Frame] = deque()

    def cut(self) -> None:
        """Lose the frames on their way, and later ones until an end notices."""
        self.to_agent = deque(maxlen=0)
        self.to_driver = deque(maxlen=0)


class _End:
    """One end: its session, its connection, and the frames that it has dealt with, by stream."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.connection: Connection | None = None
        self.sent: dict[int, list[Frame]] = {0: [], 1: []}
        self.got: dict[int, list[Frame]] = {0: [], 1: []}


class SessionWorld:
    """An agent, its driver, and drivers that took over; `make` makes the sessions of the ends."""

    def __init__(self, chance: Random, make: Callable[..., Session] = Session) -> None:
        self._chance = chance
        self._make = make
        self._count = 0
        self.agent = _End(make(BY_AGENT, BY_DRIVER))
        self.drivers = [_End(make(BY_DRIVER, BY_AGENT))]
        first = Connection()
        self.agent.connection = self.drivers[0].connection = first
        self.newest = 1
        """Newest epoch that the agent has heard of."""

    @property
    def driver(self) -> _End:
        return self.drivers[-1]

    def step(self) -> None:
        """Make one random event happen."""
        steps = [self.driver_sends, self.agent_sends, self.deliver_to_agent, self.deliver_to_driver] * 3
        self._chance.choice(
            [*steps, self.acknowledge, self.cut, self.resume, self.resume, self.take_over, self.stale]
        )()

    def _frame(self, kinds: tuple[str, ...]) -> Frame:
        self._count += 1
        return self._chance.choice(kinds), self._count

    def driver_sends(self) -> None:
        frame = self._frame((*_ORDERS, *_INPUTS))
        end = self.driver
        end.session.sending(frame[0], frame)
        end.sent[BY_DRIVER[frame[0]]].append(frame)
        if end.connection is not None:
            end.connection.to_agent.append(frame)

    def agent_sends(self) -> None:
        frame = self._frame((*_REPORTS, *_ANSWERS))
        end = self.agent
        end.session.sending(frame[0], frame)
        end.sent[BY_AGENT[frame[0]]].append(frame)
        if end.connection is not None:
            end.connection.to_driver.append(frame)

    def deliver_to_agent(self) -> None:
        connection = self.agent.connection
        if connection is not None and connection.to_agent:
            self._take(self.agent, connection.to_agent.popleft(), BY_DRIVER)

    def deliver_to_driver(self) -> None:
        connection = self.driver.connection
        if connection is not None and connection.to_driver:
            self._take(self.driver, connection.to_driver.popleft(), BY_AGENT)

    @staticmethod
    def _take(end: _End, frame: Frame, streams: Any) -> None:
        kind, body = frame
        if kind == "have":
            end.session.taken(body)
            return
        end.session.received(kind, 1)
        end.got[streams[kind]].append(frame)

    def acknowledge(self) -> None:
        """Let each end acknowledge its frames."""
        if self.agent.connection is not None:
            self.agent.connection.to_driver.append(("have", self.agent.session.tell()))
        if self.driver.connection is not None:
            self.driver.connection.to_agent.append(("have", self.driver.session.tell()))

    def cut(self) -> None:
        """Lose the connection; each end notices now or later."""
        connection = self.driver.connection
        if connection is None:
            return
        connection.cut()
        if self._chance.random() < 0.7:
            self.driver.connection = None
        if self.agent.connection is connection and self._chance.random() < 0.7:
            self.agent.connection = None

    def resume(self) -> None:
        """Let the driver connect again; the connection may be lost before the answer arrives."""
        connection = Connection()
        again = self._admit(self.driver, connection)
        self.driver.connection = None
        if self._chance.random() < 0.2:
            connection.cut()
            return
        for frame in again:
            connection.to_agent.append(frame)
        self.driver.connection = connection

    def _admit(self, driver: _End, connection: Connection) -> list[Frame]:
        """Do the handshake of agent and driver. Raises StaleEpoch."""
        have = driver.session.tell()
        is_new = self.agent.session.begin_epoch(driver.session.epoch)
        if driver.session.epoch < self.newest:
            raise Broken(
                f"a driver of epoch {driver.session.epoch} is heard, after one of epoch {self.newest}"
            )
        self.newest = driver.session.epoch
        if is_new:
            self.agent.sent[1], self.agent.got[1] = [], []
        again = self.agent.session.again(have)
        self.agent.connection = connection
        connection.to_driver.extend(again)
        return driver.session.again(self.agent.session.tell())

    def take_over(self) -> None:
        """Replace a dead driver by one that replays its orders and news."""
        if self._chance.random() < 0.8:
            return
        before = self.driver
        after = _End(self._make(BY_DRIVER, BY_AGENT, before.session.epoch + 1))
        for frame in before.sent[0]:
            after.session.sending(frame[0], frame)
        for frame in before.got[0]:
            after.session.received(frame[0], 1)
        after.sent[0], after.got[0] = list(before.sent[0]), list(before.got[0])
        before.connection = None
        self.drivers.append(after)
        self.resume()

    def stale(self) -> None:
        """Let a driver come back that was believed dead."""
        if len(self.drivers) == 1:
            return
        old = self._chance.choice(self.drivers[:-1])
        if self.newest < self.driver.session.epoch:
            return  # the agent can't know yet
        try:
            self._admit(old, Connection())
        except StaleEpoch:
            return
        raise Broken("a driver is heard that another has taken over from")

    def check(self) -> None:
        """Check that received frames are a prefix of the sent ones. Raises Broken."""
        for name, sender, getter in (("agent", self.driver, self.agent), ("driver", self.agent, self.driver)):
            for stream in (0, 1):
                if stream == 1 and self.newest != self.driver.session.epoch:
                    continue  # the driver has not come yet
                got, sent = getter.got[stream], sender.sent[stream]
                if got != sent[: len(got)]:
                    raise Broken(f"the {name} got {got[-4:]}, where {sent[: len(got)][-4:]} were sent")

    def settle(self) -> None:
        """Check that everything arrives over a connection that holds. Raises Broken."""
        self.resume()
        while self.driver.connection is None:
            self.resume()
        for _ in range(10 * self._count + 100):
            self.deliver_to_agent()
            self.deliver_to_driver()
        self.check()
        for sender, getter in ((self.driver, self.agent), (self.agent, self.driver)):
            if getter.got != sender.sent:
                raise Broken("something was lost")


def play(seed: int, make: Callable[..., Session] = Session, steps: int = 120) -> SessionWorld:
    """Play the history of a seed. Raises Broken."""
    world = SessionWorld(Random(seed), make)
    for _ in range(steps):
        world.step()
        world.check()
    world.settle()
    return world
