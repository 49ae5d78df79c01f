"""Laws of sessions across lost connections and drivers: no message is lost, doubled or reordered."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from tests.simulation.journals import Origin
from tests.simulation.links import ORDERS
from tests.simulation.wires import Agent, Frame

if TYPE_CHECKING:
    from tests.simulation.wired import Wired

__all__ = ["Continuity"]

Key = tuple[str, int]


class Continuity:
    """Knows the agents' messages and the record. Agents are told apart by host and number."""

    def __init__(self, world: "Wired") -> None:
        self._world = world
        self._kept: dict[Key, int] = defaultdict(int)
        """Number of the newest frame with its event in the journal."""
        self._printed: dict[Key, int] = defaultdict(int)
        self._agents: dict[str, int] = {}
        """Newest agent of each host in the journal."""
        self._orders: dict[Key, list[do.Action]] = defaultdict(list)
        """Orders in the journal for each agent."""
        self._epochs: dict[Agent, int] = defaultdict(int)
        self._version = 0
        self._closed: list[Key] = []

    def kept(self, event: on.Event, actions: Iterable[Any], origin: Origin | None) -> None:
        """Check a turn that went into the journal."""
        if origin is not None and (origin.host, origin.agent) in self._world.agents:
            self._said(event, origin)
        elif origin is not None:
            assert origin.number > self._version, f"{event} of the rendezvous is heard again"
            self._version = origin.number
        for action in actions:
            if type(action) in ORDERS and action.host in self._agents:
                self._orders[action.host, self._agents[action.host]].append(action)

    def _said(self, event: on.Event, origin: Origin) -> None:
        key, number = (origin.host, origin.agent), origin.number
        agent = self._world.agents[key]
        assert type(agent.sent[number - 1].body) is type(event), f"frame {number} of {agent} is not {event}"
        self._next(self._kept, agent, number, lambda frame: frame.kind != "output")
        if isinstance(event, on.HostReady):
            self._agents[origin.host] = origin.agent
        if isinstance(event, on.HostClosed):
            self._closed.append(key)

    @staticmethod
    def _next(newest: dict[Key, int], agent: Agent, number: int, is_one: Any) -> None:
        before = newest[agent.host, agent.number]
        assert number > before, f"frame {number} of {agent} is heard after {before}: {agent.sent[number - 1]}"
        missed = [frame for frame in agent.sent[before : number - 1] if is_one(frame)]
        assert not missed, f"lost of {agent}: {missed}"
        newest[agent.host, agent.number] = number

    def printed(self, host: str, number: int, frame: int) -> None:
        """Check printed output."""
        agent = self._world.agents[host, number]
        self._next(self._printed, agent, frame, lambda candidate: candidate.kind == "output")

    def order(self, agent: Agent, frame: Frame) -> None:
        """Check an order that an agent is about to carry out."""
        if frame.body is None:
            assert not agent.obeyed, f"{agent} is greeted again"
            return
        orders = self._orders[agent.host, agent.number]
        expected = orders[agent.obeyed] if agent.obeyed < len(orders) else None
        assert frame.body == expected, f"{agent} does {frame.body}, and the journal has {expected}"
        agent.obeyed += 1

    def acknowledged(self, agent: Agent, count: int) -> None:
        """Check an agent that forgets its first frames."""
        key = agent.host, agent.number
        for number, frame in enumerate(agent.sent[:count], 1):
            newest = self._printed[key] if frame.kind == "output" else self._kept[key]
            assert number <= newest, f"{agent} is to forget what nobody has: {frame}"

    def admitted(self, agent: Agent, epoch: int) -> None:
        """Check a driver that an agent admits."""
        assert epoch >= self._epochs[agent], f"{agent} hears driver {epoch} after {self._epochs[agent]}"
        self._epochs[agent] = epoch

    def end(self) -> None:
        """Check the end of a job: all received output is printed."""
        for key in self._closed:
            agent = self._world.agents[key]
            if agent.is_ending or agent.is_lost:
                continue  # it waits for nobody
            last = max((n for n, frame in enumerate(agent.sent, 1) if frame.kind == "output"), default=0)
            assert self._printed[key] >= last, f"output of {agent} is lost"
