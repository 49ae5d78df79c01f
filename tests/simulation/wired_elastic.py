"""Elastic jobs with lost drivers and connections."""

import signal
from functools import partial
from typing import Any

from hvlaunch.engine import events as on
from hvlaunch.engine.hosts import HostState
from hvlaunch.errors import HostLost
from tests.simulation.breakdowns import Breakdowns
from tests.simulation.elastic_world import ElasticWorld, SimHost
from tests.simulation.faults import NOTICED
from tests.simulation.links import Link
from tests.simulation.wired import Wired
from tests.simulation.wires import Agent, Frame

__all__ = ["WiredElasticWorld"]

_OVER = 45.0
_AWAKE = 6.0
"""Seconds for a successor to hear old news."""
_LINKS = {
    HostState.NONE: "none",
    HostState.CONNECTING: "connecting",
    HostState.READY: "ready",
    HostState.PARTING: "ready",
    HostState.CLOSING: "closing",
}


class WiredElasticWorld(Wired, ElasticWorld):
    """An elastic world's faults, and those of connections and drivers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lease = self.spec.lease
        self.agents_lease = self.lease + 2.0
        self.plug_in(Breakdowns(seed, over=_OVER, lease=self.lease))

    @property
    def is_asleep(self) -> bool:
        return False

    def wake_up(self) -> None:
        """Read old messages without a report of a stop: the driver was late, but never stopped."""

    @property
    def is_late(self) -> bool:
        return self.now < self.asleep_until or any(
            link.wire is None and not link.is_over for link in self.links.values()
        )

    def hear(self, host: SimHost, event: on.Event, agent: int | None = None) -> None:
        number = host.agent if agent is None else agent
        if isinstance(event, on.HostReady):
            self.greeted(host.name, number)
        self.report(host.name, number, event)

    def is_held(self, host: str, end: str, frame: Frame) -> bool:
        sim_host = self.hosts[host]
        is_full = sim_host.is_full and end == "driver" and frame.kind in ("exited", "bye")
        return not sim_host.reachable or is_full

    def reaches(self, host: str) -> bool:
        return self.hosts[host].reachable

    def is_there(self, event: Any) -> bool:
        process = self.workers.find(event.host, event.slot, event.start)
        return process is not None and process.live

    def take(self, link: Link, number: int, frame: Frame) -> None:
        if frame.kind == "bye":
            host = self.hosts[link.host]
            self.all_die(host, link.agent)
            host.link = "none"
        super().take(link, number, frame)

    def is_long_unaware(self, host: str) -> None:
        self.faulty.add(
            host
        )  # as one that is cut off: it is lost where the ends of its workers are waited for

    def close(self, link: Link) -> None:
        self.hosts[link.host].link = "none"
        self.tell(on.HostClosed(link.host))

    def give_up(self, link: Link) -> None:
        self.faulty.add(link.host)
        super().gone(self.hosts[link.host], link.agent)

    def gone(self, host: SimHost, agent: int) -> None:
        if self.is_driven:
            super().gone(host, agent)

    def all_die(self, host: SimHost, agent: int | None = None) -> None:
        super().all_die(host, agent)
        for (name, number), wired_agent in self.agents.items():
            if name == host.name and agent in (None, number) and not wired_agent.has_parted:
                wired_agent.die()

    def _end_agent(self, host: SimHost) -> None:
        ElasticWorld.all_die(self, host)  # its agent is there until its driver has heard all of it
        if host.staying != host.agent:
            self.hear(host, on.HostClosed(host.name))

    def reopen(self, host: str) -> None:
        sim_host = self.hosts[host]
        sim_host.link = "none"
        self._connect(sim_host)

    def returned(self, states: dict[str, HostState]) -> None:
        self.asleep_until = max(self.now, self.asleep_until) + _AWAKE
        for name, host in self.hosts.items():
            host.link = _LINKS[states.get(name, HostState.NONE)]
            host.is_quiet = False
            self.at(NOTICED, partial(self.notice, host))
        if self.options.discovers:
            self.at(0.1, self.discover)

    def _leave(self) -> None:
        if self.result is not None:
            self.invariants.check_end(self.result)
        super()._leave()

    @property
    def living(self) -> list[str]:
        return [
            str(process)
            for host in self.hosts.values()
            for process in host.processes
            if not process.outlives_kill
        ]

    def agent_gives_up(self, agent: Agent) -> None:
        host = self.hosts[agent.host]
        if host.agent != agent.number or not host.reachable:
            self.all_die(host, agent.number)
            return
        if host.name not in self.faulty:
            self.check_gives_up(agent)
        self.faulty.add(host.name)
        self.faults.append("part")
        self.workers.codes.add(128 + signal.SIGTERM)
        problem = HostLost("the driver is gone", host=host.name).problem
        self.report(host.name, agent.number, on.HostParting(host.name, problem))
        for process in list(host.processes):
            if process.agent == agent.number:
                self.at(self.delay(), lambda process=process: self.workers.end(process, None, signal.SIGTERM))  # type: ignore[misc]
        self.at(self.grace, lambda: self.all_die(host, agent.number))
