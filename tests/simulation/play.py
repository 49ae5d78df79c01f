"""One job's engine on a virtual clock, with the history of its turns."""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.job import JobResult, JobSpec

__all__ = ["QUIET", "Play", "facts"]

MOST_TICKS = 5
"""Most ticks in a row at the same time."""
QUIET = (on.WorkerBeat, on.Tick, on.HostProbed, on.RendezvousReached)


class Play(ABC):
    """A game whose subclass is the job's world: it has the engine, and carries out its actions. Same seed, same history."""

    spec: JobSpec
    engine: Engine

    def __init__(self, seed: int, *, most_steps: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.is_driven = True
        """True while a driver runs."""
        self.epoch = 0
        """Number of the current driver."""
        self._stacks = random.Random(f"stacks {seed}")
        self.history: list[str] = []
        self.turns: list[tuple[float, on.Event, list[do.Action]]] = []
        self.result: JobResult | None = None
        self._most_steps = most_steps
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._ticks = 0

    @abstractmethod
    def begin(self) -> None:
        """Begin the job."""

    @abstractmethod
    def carry_out(self, action: do.Action) -> None:
        """Carry out an action."""

    def keep(self, event: on.Event, actions: list[do.Action]) -> None:  # noqa: B027 (most worlds keep nothing)
        """Record the turn before its actions are carried out."""

    @property
    def deadline(self) -> float | None:
        """The time of the engine's next Tick."""
        return self.engine.deadline

    @property
    def due(self) -> float | None:
        """The time of the next planned call."""
        return self._queue[0][0] if self._queue else None

    def at(self, delay: float, call: Callable[[], object]) -> None:
        """Plan a call; calls for the same time keep their order."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call))

    def run(self) -> JobResult:
        """Play to the end. Raises AssertionError if the job never ends, or a law is broken."""
        self.begin()
        for _ in range(self._most_steps):
            if self.result is not None:
                return self.result
            self.step()
        raise AssertionError("the job never ends")

    def step(self) -> None:
        """Make the next call or tick, whichever comes first."""
        deadline, due = self.deadline, self.due
        if deadline is not None and (due is None or deadline <= due):
            assert deadline > self.now or self._ticks < MOST_TICKS, "the engine wants ticks without end"
            self._ticks = self._ticks + 1 if deadline <= self.now else 0
            self.now = max(self.now, deadline)
            self.tell(on.Tick())
            return
        assert due is not None, "nothing can ever happen again"
        when, _, call = heapq.heappop(self._queue)
        self.now = max(self.now, when)
        call()

    def tell(self, event: on.Event) -> None:
        """Give an event to the engine, and carry out its actions."""
        for action in self.handle(event):
            self.act(action)

    def act(self, action: do.Action) -> None:
        """Carry out the next action of a turn."""
        self.history.append(f"        -> {action}")
        assert self.result is None, f"{action} after Finish"
        if isinstance(action, do.Finish):
            self.result = action.result
        if isinstance(action, do.TakeStacks):
            self._take_stacks(action)
        self.carry_out(action)

    def _take_stacks(self, action: do.TakeStacks) -> None:
        """Answer a request for stacks: soon, or never, or after the end of the driver that asked."""
        epoch = self.epoch

        def answer() -> None:
            if self.is_driven and self.epoch == epoch and self.result is None:
                self.tell(on.StacksTaken(action.host, action.number))

        if self._stacks.random() < 0.9:
            self.at(self._stacks.expovariate(5.0), answer)

    def handle(self, event: on.Event) -> list[do.Action]:
        """Return the engine's actions. A subclass raises AssertionError for wrong ones."""
        actions = self.engine.handle(event, self.now)
        self.keep(event, actions)
        self.turns.append((self.now, event, actions))
        if actions or not isinstance(event, QUIET):
            self.history.append(f"{self.now:7.2f} {event}")
        return actions


def facts(number: int) -> on.HostFacts:
    """Return facts of the host 10.0.0.<number>, and so on."""
    address = f"10.0.{number >> 8}.{number & 255}"
    return on.HostFacts(
        addresses={"eth0": (address,)},
        cpus=4,
        gpus=None,
        scratch="/tmp/x",
        beacon_port=1,
        master_port=2,
        peer_address=address,
    )
