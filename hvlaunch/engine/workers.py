"""The living workers, inside and outside of rounds, and their signals. Pure."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Generic, TypeVar

from hvlaunch.engine.actions import Action, Leave, Step, Stop, TakeStacks
from hvlaunch.engine.causes import Cause
from hvlaunch.engine.events import WorkerExited, WorkerNotStarted
from hvlaunch.engine.waits import Cooldown, Wait, Waits
from hvlaunch.errors import Defect
from hvlaunch.hosts.placement import Launch, Placement, Seat
from hvlaunch.job import WorkerExit
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "AT_ONCE",
    "ENDING",
    "LIVING",
    "TIME",
    "TRANSITIONS",
    "InvalidTransition",
    "Life",
    "Orders",
    "StacksBeforeKill",
    "Transition",
    "Worker",
    "WorkerState",
    "WorkerTrigger",
    "Workers",
    "gently",
    "passing_on",
]

_REMEMBERED = 16


class WorkerState(Enum):
    STARTING = "was started to ask for a place, and has not asked yet"
    WAITING = "has asked for a place, and has none"
    WORKING = "is in a round"
    ASIDE = "was in a round that the others have left without it, since its host gives no sign of life"
    DISMISSED = "waited for a place; was told that there is none, and to end well"
    STOPPING = "was told to end"
    HANGING = "did not do what it should, and is killed: its end is a failure"
    ENDED = "is no more"


class WorkerTrigger(Enum):
    """Causes of a change of a worker's state."""

    ASKED = "it asked for a place"
    PLACED = "it was given a place in a round"
    SET_ASIDE = "its host gives no sign of life, and the others can do without it"
    TAKEN_BACK = "the first worker asked: so the round that all were started for is still to come"
    DISMISSED = "there is no place for it any more"
    STOPPED = "it is to end"
    HANGS = "it hangs"
    ENDED = "its end was reported"
    LOST = "its host is gone"


_FROM_NOW_ON: Mapping[WorkerTrigger, WorkerState] = {
    WorkerTrigger.STOPPED: WorkerState.STOPPING,
    WorkerTrigger.HANGS: WorkerState.HANGING,
    WorkerTrigger.ENDED: WorkerState.ENDED,
    WorkerTrigger.LOST: WorkerState.ENDED,
}
"""Possible transitions of every worker that was not told to end."""


def _to_the_end(state: WorkerState) -> Mapping[WorkerTrigger, WorkerState]:
    """Return the transitions of a stopped worker, which keeps its state to the end."""
    return {
        WorkerTrigger.STOPPED: state,
        WorkerTrigger.TAKEN_BACK: state,
        WorkerTrigger.ENDED: WorkerState.ENDED,
        WorkerTrigger.LOST: WorkerState.ENDED,
    }


TRANSITIONS: dict[WorkerState, Mapping[WorkerTrigger, WorkerState]] = {
    WorkerState.STARTING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        **_FROM_NOW_ON,
    },
    WorkerState.WAITING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        WorkerTrigger.PLACED: WorkerState.WORKING,
        WorkerTrigger.DISMISSED: WorkerState.DISMISSED,
        **_FROM_NOW_ON,
    },
    WorkerState.WORKING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        WorkerTrigger.SET_ASIDE: WorkerState.ASIDE,
        WorkerTrigger.TAKEN_BACK: WorkerState.STARTING,
        **_FROM_NOW_ON,
    },
    WorkerState.ASIDE: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        **_FROM_NOW_ON,
    },
    WorkerState.DISMISSED: _to_the_end(WorkerState.DISMISSED),
    WorkerState.STOPPING: _to_the_end(WorkerState.STOPPING),
    WorkerState.HANGING: _to_the_end(WorkerState.HANGING),
    WorkerState.ENDED: {},
}

LIVING = (WorkerState.STARTING, WorkerState.WAITING, WorkerState.WORKING, WorkerState.ASIDE)
"""States of workers that were not told to end."""
ENDING = (WorkerState.DISMISSED, WorkerState.STOPPING, WorkerState.HANGING)
"""States of workers that were told to end, and have not ended."""


S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)


class Transition(NamedTuple):
    """One transition, at `when` (seconds of the driver's clock)."""

    when: float
    before: Enum
    trigger: Enum
    after: Enum


class InvalidTransition(Defect):
    """An event does not fit the state of its worker or round. `name` says whose, `story` has its last transitions."""

    def __init__(
        self, name: str, state: Enum, trigger: Enum, now: float, story: Sequence[Transition]
    ) -> None:
        steps = "; ".join(
            f"{step.when - now:+.2f} s {step.before.name} -{step.trigger.name}-> {step.after.name}"
            for step in story
        )
        super().__init__(
            f"{name} is {state.name}, where {trigger.name} can't come; before: {steps or 'nothing'}"
        )
        self.name = name
        self.state = state
        self.trigger = trigger
        self.story = tuple(story)


class Life(Generic[S, T]):
    """The state of a worker or round, with its last transitions. Only the table's transitions are possible.

    `name` is for messages.
    """

    def __init__(self, name: str, state: S, table: Mapping[S, Mapping[T, S]]) -> None:
        self._name = name
        self._table = table
        self.state = state
        self.story: tuple[Transition, ...] = ()
        """The last transitions, oldest first."""

    def go(self, trigger: T, now: float) -> S:
        """Make the table's transition for the trigger, and return the new state. Raises InvalidTransition."""
        after = self._table[self.state].get(trigger)
        if after is None:
            raise InvalidTransition(self._name, self.state, trigger, now, self.story)
        self.story = (*self.story[1 - _REMEMBERED :], Transition(now, self.state, trigger, after))
        self.state = after
        return after


AT_ONCE = (Step(signal.SIGKILL, 0.0),)

_PATIENCE = 10.0
"""Seconds from the last signal to the required end of a worker."""


def gently(grace: float, after: float = 0.0) -> tuple[Step, ...]:
    """Return SIGTERM, and SIGKILL after the grace."""
    return Step(signal.SIGTERM, after), Step(signal.SIGKILL, after + grace)


def passing_on(interrupt: int, grace: float) -> tuple[Step, ...]:
    """Return the steps after an interrupt: a SIGINT is passed on first, for half of the grace."""
    if interrupt != signal.SIGINT:
        return gently(grace)
    return Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, grace / 2), Step(signal.SIGKILL, grace)


class Orders:
    """Signals to end a worker. Times are seconds of the driver's clock."""

    def __init__(self) -> None:
        self.is_by_agent = False
        """True if the worker's agent stops the worker by itself, perhaps before the driver knows."""
        self._first_at: float | None = None
        self._signals: set[int] = set()
        self._killed_at: float | None = None
        """Time of the ordered SIGKILL."""

    def add(self, steps: Sequence[Step], now: float) -> float | None:
        """Note an order of these steps, in place of an earlier order.

        Returns when the worker must have ended; None after an earlier SIGKILL, which allows no more time.
        """
        first, last = now + steps[0].after, now + steps[-1].after
        # After SIGKILL no other signal can take effect.
        is_killed = self._killed_at is not None and now >= self._killed_at
        self._first_at = first if self._first_at is None else min(self._first_at, first)
        self._signals.update(step.signal for step in steps)
        kills = [now + step.after for step in steps if step.signal == signal.SIGKILL]
        self._killed_at = min((at for at in (self._killed_at, *kills) if at is not None), default=None)
        return None if is_killed else last + _PATIENCE

    def had_begun(self, at: float) -> bool:
        """True if the worker was sent a signal by then."""
        return self._first_at is not None and at >= self._first_at

    def caused(self, event: WorkerExited) -> bool:
        """True if the worker ended because of the order: after its signals, by one of them or well. An earlier SIGKILL was somebody else's."""
        if self._first_at is None:
            return False
        # An earlier SIGKILL came from elsewhere, such as the out-of-memory killer.
        is_ours = self.is_by_agent or (self._killed_at is not None and event.at >= self._killed_at)
        signals = self._signals - {signal.SIGKILL} | ({signal.SIGKILL} if is_ours else set())
        is_by_signal = event.signal in signals or (event.code or 0) - 128 in signals
        # By the host's clock: the news may arrive after our order.
        if event.at < self._first_at:
            return self.is_by_agent and is_by_signal
        return is_by_signal or event.code == 0


class Worker:
    """A process of the user's command. Times are seconds of the driver's clock."""

    def __init__(self, launch: Launch, born: int, state: WorkerState) -> None:
        self.launch = launch
        """Slot and place: in its round, or provisionally in the round it was started for."""
        self.seat = self.host, self.slot = launch.seat
        self.start = launch.start
        self.born = born
        """Number of the round that the worker was started for."""
        self.round: int | None = born if state is WorkerState.WORKING else None
        """Number of its round, also after it was stopped."""
        self.last_round = -1
        """Newest round by its own report."""
        self.commit = -1
        self.beat_at: float | None = None
        self.is_done = False
        """True if its training is done, by its own report."""
        self.orders = Orders()
        self.life = Life(f"worker {self.host}/{self.slot}/{self.start}", state, TRANSITIONS)

    @property
    def rank(self) -> int:
        return self.launch.place.rank

    @property
    def role(self) -> str:
        """Its role and its rank there, as in messages; empty in jobs without roles."""
        return "" if self.launch.role is None else self.launch.role.label

    @property
    def state(self) -> WorkerState:
        return self.life.state

    @property
    def is_ending(self) -> bool:
        """True if the worker was told to end."""
        return self.life.state in ENDING

    @property
    def has_state(self) -> bool:
        """True if the worker was in a round."""
        return self.last_round >= 0

    def is_beyond(self, last_round: int) -> bool:
        """True if the worker has a place already: its request for a round after `last_round` is an old one."""
        newest = self.last_round if self.state is WorkerState.ASIDE else self.round
        return newest is not None and last_round != newest

    def beat(self, commit: int, now: float | None) -> bool:
        """Note a heartbeat with its newest commit; `now` is None after the last beat. True if the commit is new."""
        self.beat_at = now
        is_news = commit > self.commit
        self.commit = max(self.commit, commit)
        return is_news

    def ended(self, event: WorkerExited | WorkerNotStarted, since: float, now: float) -> WorkerExit:
        """Describe the worker's end, in seconds from `since`."""
        if isinstance(event, WorkerNotStarted):
            return WorkerExit(
                rank=self.rank,
                host=self.host,
                code=event.code,
                when=now - since,
                not_started=event.cause,
                role=self.role,
            )
        return WorkerExit(
            rank=self.rank,
            host=self.host,
            code=event.code,
            signal=event.signal,
            when=max(0.0, event.at - since),
            max_rss=event.max_rss,
            oom_killed=event.oom_killed,
            port_taken_by=event.port_taken_by,
            port_holder=event.port_holder,
            stopped=self._was_stopped(event),
            error_file=event.error_file,
            look=event.look,
            was_told=self.state is not WorkerState.HANGING and self.orders.had_begun(event.at),
            role=self.role,
        )

    def _was_stopped(self, event: WorkerExited) -> bool:
        """True if the worker ended because of our order. The end of a hanging worker is a failure all the same."""
        # It was killed for its own fault.
        if self.state is WorkerState.HANGING:
            return False
        return (self.state is WorkerState.DISMISSED and event.code == 0) or self.orders.caused(event)


class Workers:
    """The living workers by host and slot, a single worker per slot."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._live: dict[str, dict[int, Worker]] = {}
        self._started: Counter[Seat] = Counter()
        self._by_state: dict[WorkerState, dict[Worker, None]] = {state: {} for state in WorkerState}
        self.size = 0
        self.began_at: float | None = None
        """Time of the job's first start of workers."""
        self.cooldowns: dict[Seat, Cooldown] = {}

    def __iter__(self) -> Iterator[Worker]:
        for workers in self._live.values():
            yield from workers.values()

    def on(self, host: str) -> list[Worker]:
        return list(self._live.get(host, {}).values())

    def at(self, seat: Seat) -> Worker | None:
        return self._live.get(seat[0], {}).get(seat[1])

    def in_seats(self, seats: Iterable[Seat]) -> list[Worker]:
        """Return the living workers in these seats, in their order."""
        return [worker for seat in seats if (worker := self.at(seat)) is not None]

    def find(self, seat: Seat, start: int) -> Worker | None:
        """Return the worker if it still lives."""
        worker = self.at(seat)
        return worker if worker is not None and worker.start == start else None

    @property
    def hosts(self) -> list[str]:
        """Names of hosts with living workers."""
        return [host for host, workers in self._live.items() if workers]

    def count(self, state: WorkerState) -> int:
        """Return the number of workers in this state."""
        return len(self._by_state[state])

    def within(self, *states: WorkerState) -> list[Worker]:
        """Return workers in these states, by the time of entering them."""
        return [worker for state in states for worker in self._by_state[state]]

    @property
    def living(self) -> list[Worker]:
        """Workers that were not told to end, by host."""
        return [worker for worker in self if not worker.is_ending]

    @property
    def waiting(self) -> list[Worker]:
        """Workers with an unanswered request for a place, by host."""
        return [worker for worker in self if worker.state is WorkerState.WAITING]

    @property
    def working(self) -> list[Worker]:
        """Members of the round that have neither left nor been told to end, by rank."""
        return sorted(self._by_state[WorkerState.WORKING], key=lambda worker: worker.rank)

    def next_launch(self, seat: Seat, place: Placement) -> Launch:
        """Return the launch of the seat's next worker."""
        return Launch(seat[1], self._started[seat], place)

    def launch(self, launch: Launch, *, born: int, state: WorkerState, now: float) -> Worker:
        """Add a worker that begins in this state: WORKING, or STARTING if it will ask for a place."""
        worker = Worker(launch, born, state)
        self._started[worker.seat] += 1
        self.began_at = now if self.began_at is None else self.began_at
        self._live.setdefault(worker.host, {})[worker.slot] = worker
        self._by_state[state][worker] = None
        self.size += 1
        return worker

    def give_place(self, launch: Launch, number: int, now: float) -> None:
        """Give the asking worker its place in this round."""
        worker = self._live[launch.host][launch.slot]
        self.go(worker, WorkerTrigger.PLACED, now)
        worker.launch = launch
        worker.round = worker.last_round = number
        self.cooldowns.pop(worker.seat, None)
        self._waits.end(Wait.SLOT_COOLDOWN, worker.seat)

    def ask(self, worker: Worker, last_round: int, commit: int, now: float) -> None:
        """Note that the worker left its round, if any, and waits for a later place."""
        self.go(worker, WorkerTrigger.ASKED, now)
        worker.round, worker.is_done = None, False
        # The newest request has the worker's true commit: another training counts from its beginning.
        if last_round >= worker.last_round:
            worker.last_round, worker.commit = last_round, commit

    def set_aside(self, workers: Iterable[Worker], now: float) -> None:
        """Take these workers out of their round, which goes on without them."""
        for worker in workers:
            self.go(worker, WorkerTrigger.SET_ASIDE, now)
            worker.round = None

    def take_back(self, now: float) -> None:
        """Take the workers out of their first round, which is still to come."""
        for worker in list(self):
            self.go(worker, WorkerTrigger.TAKEN_BACK, now)
            worker.round = None

    def go(self, worker: Worker, trigger: WorkerTrigger, now: float) -> None:
        """Change the worker's state. Raises InvalidTransition."""
        before = worker.state
        after = worker.life.go(trigger, now)
        # Some transitions keep the state, and with it the place in the order.
        if after is not before:
            del self._by_state[before][worker]
            if after is not WorkerState.ENDED:
                self._by_state[after][worker] = None
        if after in ENDING or after is WorkerState.ENDED:
            self._waits.end(Wait.DRAINING, worker)
        if after is WorkerState.ENDED:
            self._waits.end(Wait.ENDING, worker)

    def stop(
        self,
        workers: Iterable[Worker],
        steps: tuple[Step, ...],
        now: float,
        trigger: WorkerTrigger = WorkerTrigger.STOPPED,
    ) -> list[Stop]:
        """End these workers; return the orders for their hosts."""
        slots: dict[str, list[int]] = {}
        for worker in workers:
            self.go(worker, trigger, now)
            until = worker.orders.add(steps, now)
            if until is not None:
                self._waits.begin(Wait.ENDING, worker, until)
            slots.setdefault(worker.host, []).append(worker.slot)
        return [Stop(host, steps, tuple(numbers)) for host, numbers in slots.items()]

    def dismiss(
        self, workers: Sequence[Worker], cause: Cause, grace: float, now: float
    ) -> list[Leave | Stop]:
        """Dismiss waiting workers, and stop them if they stay."""
        leaves = [Leave(worker.host, worker.slot, worker.start, cause) for worker in workers]
        return [*leaves, *self.stop(workers, gently(grace, grace), now, WorkerTrigger.DISMISSED)]

    def stop_by_agent(self, host: str, steps: tuple[Step, ...], now: float) -> None:
        """Note that the host's agent ends its workers by itself, by these steps."""
        workers = self.on(host)
        for worker in workers:
            worker.orders.is_by_agent = True
        self.stop(workers, steps, now)

    def remove(self, worker: Worker, now: float, trigger: WorkerTrigger = WorkerTrigger.ENDED) -> None:
        """Remove a worker that has ended."""
        self.go(worker, trigger, now)
        del self._live[worker.host][worker.slot]
        self.size -= 1

    def lose(self, host: str, now: float) -> None:
        """Remove all workers of a lost host."""
        for worker in self.on(host):
            self.remove(worker, now, WorkerTrigger.LOST)

    def forget_waits(self, host: str, now: float) -> None:
        """End the slots' own cool-downs, since the whole host has one now."""
        for seat, cooldown in self.cooldowns.items():
            if seat[0] == host:
                cooldown.cut_short(now)
                self._waits.end(Wait.SLOT_COOLDOWN, seat)


TIME = 0.45
"""Seconds by which taking stacks may delay a kill."""


class _Order(NamedTuple):
    """The order to repeat after the last stacks."""

    workers: Sequence[Worker]
    steps: tuple[Step, ...]


class StacksBeforeKill:
    """Takes stacks of workers that are to be killed; workers added meanwhile share the same time limit."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._number = 0
        self._until = 0.0
        self._awaited: set[tuple[str, int]] = set()
        """Hosts and request numbers whose stacks are missing."""
        self._orders: list[_Order] = []

    def stop(
        self,
        workers: Sequence[Worker],
        steps: tuple[Step, ...],
        now: float,
        trigger: WorkerTrigger = WorkerTrigger.STOPPED,
    ) -> list[Action]:
        """End these workers like Workers.stop(), but only after their stacks were taken, or after TIME."""
        if not workers:
            return []
        # A request that joins a running one must not delay the first kill again.
        if not self._awaited or now >= self._until:
            self.cancel()
            self._until = now + TIME
        self._number += 1
        # Rounded: float noise would be in the journal.
        delay = round(self._until - now, 6)
        # The agent gets the kill at once, with the delay: it works without a driver, too.
        delayed = tuple(Step(step.signal, delay + step.after) for step in steps)
        stops = self._workers.stop(workers, delayed, now, trigger)
        self._awaited.update((stop.host, self._number) for stop in stops)
        self._orders.append(_Order(workers, steps))
        takes = [TakeStacks(stop.host, self._number, stop.slots or ()) for stop in stops]
        return [*takes, *stops]

    def taken(self, host: str, number: int, now: float) -> list[Stop]:
        """Note the arrival or absence of a host's stacks."""
        if (host, number) not in self._awaited:
            return []
        self._awaited.discard((host, number))
        if self._awaited:
            return []
        # All stacks are there: the same orders again, without the delay.
        orders, self._orders = self._orders, []
        if now >= self._until:
            return []
        return [
            stop
            for order in orders
            for stop in self._workers.stop(
                [worker for worker in order.workers if self._workers.at(worker.seat) is worker],
                order.steps,
                now,
            )
        ]

    def cancel(self) -> None:
        """Drop the waiting orders: other orders replace them."""
        self._awaited.clear()
        self._orders.clear()
