"""Faults of connections and drivers: their times and lengths."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Literal

from hvlaunch.agent.wire.frames import StaleEpoch
from hvlaunch.engine import actions as do
from tests.simulation.links import Link
from tests.simulation.wires import Agent, Frame, Wire

if TYPE_CHECKING:
    from tests.simulation.wired import Wired

__all__ = ["Breakdowns", "Kill"]

Kill = Literal["before", "torn", "idle", "put", "told", "bye"] | int
"""Moment of a driver's death: in a turn before its record is written, while it is, or after some of its actions; between two
turns; after a worker's message at the rendezvous; during messages to workers, or its last one; after an agent's
last frame.
"""

_KILLS: tuple[Kill, ...] = ("before", "torn", "idle", "put", "told", "told", "bye", 0, 0, 1, 2, 99)
_WORDS = (do.Assign, do.Leave, do.Break, do.Change, do.Finish)
_APART = 2.0
_SLACK = 1.5
_CLOSE = 1.2
"""Least time that a successor needs."""


class Breakdowns:
    """The faults of one history. If it is `gentle`, they heal in time, so that no host may be given up for them."""

    def __init__(self, seed: int, *, over: float, lease: float) -> None:
        """`over` is the length of the faults' time in seconds. `lease` is the driver's; agents of a detached job wait as long."""
        self._random = random = Random(f"breakdowns {seed}")
        self._over = over
        self.is_gentle = random.random() < 0.5
        self.reconnect = random.choice([2.0, 5.0, lease])
        self.is_orphaned = False
        """True if no driver takes the job over."""
        self._armed: Kill | None = None
        self._quiet_until = 0.0
        """Time before which no other fault happens."""
        self._left = 0.0
        """Seconds for which agents still wait for a driver."""
        self._came_at = -_APART
        self._refused: dict[str, float] = {}
        self._zombies: list[tuple[Link, Wire]] = []
        self.counts = {"wires": 0, "kills": 0, "successors": 0, "zombies": 0}

    def plan(self, world: Wired) -> None:
        random = self._random
        for _ in range(random.randint(0, 4)):
            world.at(random.random() * self._over, lambda: self._break_wire(world))
        for _ in range(random.randint(0, 3)):
            kill = random.choice(_KILLS)
            world.at(random.random() * self._over, lambda kill=kill: self._arm(world, kill))  # type: ignore[misc]

    def _is_quiet(self, world: Wired) -> bool:
        return self.is_gentle and world.now < self._quiet_until

    # Connections

    def _break_wire(self, world: Wired) -> None:
        links = [link for link in world.links.values() if link.wire is not None]
        if not world.is_driven or not links or self._is_quiet(world) or world.result is not None:
            return
        self._quiet_until = world.now + _APART
        link = self._random.choice(links)
        agent = world.agents[link.host, link.agent]
        self.counts["wires"] += 1
        if link.wire is not None:
            self._break(world, link, agent, link.wire)

    def _break(self, world: Wired, link: Link, agent: Agent, wire: Wire) -> None:
        random = self._random
        kind = random.choice(["reset", "reset", "agent unaware", "driver unaware", "refused"])
        world.history.append(f"{world.now:7.2f} *** the connection to {link.host}: {kind}")
        wire.cut(*random.choice([("agent", "driver"), ("agent", "driver"), ("agent",), ("driver",)]))
        soon = random.random() * 0.3
        late = soon if self.is_gentle else world.lease / 2
        if kind == "driver unaware" and not self.is_gentle:
            world.is_long_unaware(link.host)
        world.at(late if kind == "driver unaware" else soon, lambda: link.lose(wire))
        world.at(0.05, lambda: wire.cut("agent", "driver"))
        if kind == "agent unaware":
            agent.miss(wire)
        else:
            world.at(random.random() * 0.3, lambda: agent.lose(wire))
        if kind == "refused":
            self._refused[link.host] = world.now + (0.5 if self.is_gentle else random.choice([0.5, 8.0]))

    def refuses(self, host: str, now: float) -> bool:
        """True if the host's sshd is away for a moment."""
        return now < self._refused.get(host, 0.0)

    def may_break(self, world: Wired, link: Link, agent: Agent, wire: Wire) -> None:
        """Break a connection that is just being made."""
        if self._random.random() < 0.15:
            world.at(self._random.random() * 0.05, lambda: self._break_new(world, link, agent, wire))

    def _break_new(self, world: Wired, link: Link, agent: Agent, wire: Wire) -> None:
        world.history.append(f"{world.now:7.2f} *** the new connection to {link.host} breaks")
        wire.cut("agent", "driver")
        world.at(self._random.random() * 0.1, lambda: link.lose(wire))
        if self._random.random() < 0.7:
            world.at(self._random.random() * 0.1, lambda: agent.lose(wire))
        else:
            agent.miss(wire)

    # Drivers

    def _arm(self, world: Wired, kill: Kill) -> None:
        if world.result is not None or not world.is_driven:
            return
        if self._is_quiet(world):
            world.at(_APART, lambda: self._arm(world, kill))
        elif kill == "idle":
            world.die()
        else:
            self._armed = kill

    def kill_in_turn(self, actions: Sequence[do.Action]) -> Kill | None:
        """Return whether, and when, the driver is killed in a turn with these actions."""
        kill = self._armed
        if kill == "told":
            words = [number for number, action in enumerate(actions) if isinstance(action, _WORDS)]
            kill = self._random.choice(words) if words else None
        if kill in (None, "put", "bye") or (isinstance(kill, int) and kill and not actions):
            return None
        self._armed = None
        return min(kill, len(actions)) if isinstance(kill, int) else kill

    def kills_at(self, kill: Kill) -> bool:
        """True if the driver is killed now."""
        if self._armed != kill:
            return False
        self._armed = None
        return True

    def driver_died(self, world: Wired) -> None:
        """Close the driver's sockets; or leave them, as a frozen process or a power loss does."""
        self.counts["kills"] += 1
        random = self._random
        is_seen = random.random() < 0.8
        is_frozen = not is_seen and random.random() < 0.5
        for link in world.links.values():
            wire = link.wire or link.candidate
            if wire is None or (link.host, link.agent) not in world.agents:
                continue
            agent = world.agents[link.host, link.agent]
            wire.cut("driver")
            if not world.reaches(link.host):
                agent.miss(wire)
            if is_seen:
                wire.end("agent", random.randint(0, 3))
                continue
            agent.miss(wire)
            if is_frozen:
                self._zombies.append((link, wire))
            else:
                wire.cut("agent")
        self._plan_successor(world)

    def _plan_successor(self, world: Wired) -> None:
        random = self._random
        if world.now > self._came_at + _APART:
            self._left = self.reconnect - _CLOSE
        gaps = [random.random() * self._left]
        if not self.is_gentle:
            gaps += [self.reconnect + random.random() * world.grace, world.agents_lease + world.grace + 2.0]
        if not self.is_gentle and random.random() < 0.15:
            self.is_orphaned = True
            world.at(world.agents_lease + world.grace + 2 * _SLACK, lambda: None)
        else:
            gap = random.choice(gaps)
            self._left = max(0.0, self._left - gap)
            world.at(gap, world.succeed)

    def driver_came(self, world: Wired) -> None:
        """Note that another driver took over; it may be killed soon, too."""
        self.counts["successors"] += 1
        self._came_at = world.now
        self._quiet_until = world.now + _APART
        if self._random.random() < 0.2:
            self._quiet_until = world.now + 2 * _APART
            world.at(self._random.random() * 0.1, lambda: world.die() if world.is_driven else None)
        for link, wire in self._zombies:
            world.at(self._random.random() * 3, lambda link=link, wire=wire: self._haunt(world, link, wire))  # type: ignore[misc]
        self._zombies.clear()

    def _haunt(self, world: Wired, link: Link, wire: Wire) -> None:
        """Let a driver that was believed dead write and connect again, though the agent knows its successor."""
        agent = world.agents[link.host, link.agent]
        if agent.session.epoch <= link.epoch or not agent.is_alive:
            return
        self.counts["zombies"] += 1
        wire.put("agent", Frame("stop", do.Stop(link.host, (do.Step(signal.SIGKILL, 0.0),))))
        try:
            agent.admit(Wire(world, link.host), link.epoch, [len(agent.sent), 0])
        except StaleEpoch:
            return
        raise AssertionError(f"{agent} hears driver {link.epoch}, and knows another")

    # The end

    def is_over(self, world: Wired) -> bool:
        """True if no driver will take over, and everything should have ended by now."""
        return self.is_orphaned and world.now > world.died_at + world.agents_lease + world.grace + _SLACK
