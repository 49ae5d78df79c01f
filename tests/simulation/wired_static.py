"""Static jobs with lost drivers and connections."""

import signal
from functools import partial

from hvlaunch.engine import events as on
from hvlaunch.engine.hosts import HostState
from hvlaunch.errors import HostLost
from tests.simulation.breakdowns import Breakdowns
from tests.simulation.links import Link
from tests.simulation.wired import Wired
from tests.simulation.wires import Agent
from tests.simulation.world import World, WorldHost

__all__ = ["WiredStaticWorld"]

_OVER = 6.0
_LIVES_ON = 0.8


class WiredStaticWorld(Wired, World):
    """`faults` are those of the world itself."""

    def __init__(self, seed: int, *, faults: float) -> None:
        super().__init__(seed, faults=faults)
        self._count_agents = 0
        self._agent_of: dict[str, int] = {}
        self.plug_in(Breakdowns(seed, over=_OVER, lease=self.lease))

    @property
    def living(self) -> list[str]:
        return [f"{host.name}/{slot}" for host in self.hosts.values() for slot in host.live]

    def connect(self, host: WorldHost) -> None:
        if self.is_driven:
            super().connect(host)

    def greet(self, host: WorldHost) -> None:
        if self.is_driven:
            host.link = "ready"
            self._count_agents += 1
            self._agent_of[host.name] = self._count_agents
            self.greeted(host.name, self._count_agents)
            self.send(host.name, on.HostReady(host.name, self.facts_of(host)))
            self.send(host.name, on.RendezvousReached(host.name, "10.0.0.100"))

    def interrupt(self) -> None:
        if self.is_driven:
            super().interrupt()

    def exit(self, host: WorldHost, slot: int) -> None:
        if self.random.random() > _LIVES_ON:
            super().exit(host, slot)

    def send(self, name: str, event: on.Event) -> None:
        if name in self._agent_of:
            self.report(name, self._agent_of[name], event)

    def reopen(self, host: str) -> None:
        self._agent_of.pop(host, None)
        self.hosts[host].live.clear()
        self.hosts[host].link = "connecting"

    def returned(self, states: dict[str, HostState]) -> None:
        """Restart the time limits of failures: meanwhile no driver could act on them."""
        if self.failed_at is not None and self.stopped_at is None:
            self.failed_at = max(self.failed_at, self.now - self.spec.settle)

    def close(self, link: Link) -> None:
        self.tell(on.HostClosed(link.host))

    def give_up(self, link: Link) -> None:
        self.broken.append(f"lose {link.host}")
        self.tell(on.HostGone(link.host, HostLost("lost", host=link.host).problem))

    def lose(self, host: WorldHost) -> None:
        self.broken.append(f"lose {host.name}")
        was_ready = host.link == "ready"
        agent = self._agent(host)
        if agent is not None:
            agent.is_lost = True
        self.vanish(host)
        if not was_ready and self.is_driven:
            self.tell(on.HostFailed(host.name, HostLost("lost", host=host.name).problem))

    def vanish(self, host: WorldHost) -> None:
        super().vanish(host)
        agent = self._agent(host)
        if agent is not None:
            agent.die()

    def _agent(self, host: WorldHost) -> Agent | None:
        return self.agents.get((host.name, self._agent_of.get(host.name, 0)))

    def _blame(self, agent: Agent) -> None:
        """Note all possible traces of an agent that gave its driver up."""
        self.broken += [f"lose {agent.host}", "exit 137", "exit 143"]

    def agent_gives_up(self, agent: Agent) -> None:
        host = self.hosts[agent.host]
        if self._agent_of.get(agent.host) != agent.number:
            agent.die()
            return
        self.check_gives_up(agent)
        self._blame(agent)
        self.report(
            host.name,
            agent.number,
            on.HostParting(host.name, HostLost("the driver is gone", host=host.name).problem),
        )
        host.orders += 1
        for after, number in ((0.0, signal.SIGTERM), (self.grace, signal.SIGKILL)):
            self.at(after, partial(self.deliver, host, number, host.orders))
        self.at(self.grace, partial(self.vanish, host))
