"""One job's engine on a virtual clock: what happens when, and the history of it."""

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
"""In a row, all at the same time."""
QUIET = (on.WorkerBeat, on.Tick, on.HostProbed, on.RendezvousReached)


class Play(ABC):
    """A subclass is the world of the job: it has the engine, and does what that wants. Same seed, same history."""

    spec: JobSpec
    engine: Engine

    def __init__(self, seed: int, *, most_steps: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.is_driven = True
        """Whether there is a driver."""
        self.epoch = 0
        """Which driver that is."""
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
        """What comes first."""

    @abstractmethod
    def carry_out(self, action: do.Action) -> None:
        """Do what the engine wants."""

    def keep(self, event: on.Event, wanted: list[do.Action]) -> None:  # noqa: B027 (most worlds keep nothing)
        """Before anything of this turn counts."""

    @property
    def deadline(self) -> float | None:
        """When the engine is to be called without an event."""
        return self.engine.deadline

    @property
    def due(self) -> float | None:
        """When the next call is to be made."""
        return self._queue[0][0] if self._queue else None

    def at(self, delay: float, call: Callable[[], object]) -> None:
        """Calls for the same time are made in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, call))

    def run(self) -> JobResult:
        """Until the engine has finished. Raises AssertionError where it never does, or something is wrong."""
        self.begin()
        for _ in range(self._most_steps):
            if self.result is not None:
                return self.result
            self.step()
        raise AssertionError("the job never ends")

    def step(self) -> None:
        """The next call or tick, whichever comes first."""
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
        """Something has happened now."""
        for action in self.handle(event):
            self.act(action)

    def act(self, action: do.Action) -> None:
        """The next of a turn's actions is carried out."""
        self.history.append(f"        -> {action}")
        assert self.result is None, f"{action} after Finish"
        if isinstance(action, do.Finish):
            self.result = action.result
        if isinstance(action, do.TakeStacks):
            self._take_stacks(action)
        self.carry_out(action)

    def _take_stacks(self, action: do.TakeStacks) -> None:
        """The host answers, mostly soon; or never, or when the driver that has asked is no more."""
        epoch = self.epoch

        def answer() -> None:
            if self.is_driven and self.epoch == epoch and self.result is None:
                self.tell(on.StacksTaken(action.host, action.number))

        if self._stacks.random() < 0.9:
            self.at(self._stacks.expovariate(5.0), answer)

    def handle(self, event: on.Event) -> list[do.Action]:
        """What the engine wants now. A subclass may raise AssertionError where it must not want that."""
        wanted = self.engine.handle(event, self.now)
        self.keep(event, wanted)
        self.turns.append((self.now, event, wanted))
        if wanted or not isinstance(event, QUIET):
            self.history.append(f"{self.now:7.2f} {event}")
        return wanted


def facts(number: int) -> on.HostFacts:
    """Of the host 10.0.0.<number>, and on from there."""
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
