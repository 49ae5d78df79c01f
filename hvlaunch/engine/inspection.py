"""Stacks of workers, taken before they are killed for a failure. Pure.

The agents get the kill at once, with a delay in it, and again without when all stacks are there. So none waits for a
host that is slow, or for a driver that is no more.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hvlaunch.engine.actions import Action, Step, Stop, TakeStacks
from hvlaunch.engine.life import Trigger
from hvlaunch.engine.workers import Worker, Workers

__all__ = ["TIME", "Inspection"]

TIME = 0.45
"""Seconds by which a kill may be later for it."""


class _Order(NamedTuple):
    """What is to come when all stacks are there."""

    workers: Sequence[Worker]
    steps: tuple[Step, ...]


class Inspection:
    """One at a time: whoever is to be killed while one goes on is inspected with the others, until the same time."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._number = 0
        self._until = 0.0
        self._awaited: set[tuple[str, int]] = set()
        """Hosts whose stacks are not there, with the number under which they were asked."""
        self._orders: list[_Order] = []

    def stop(
        self,
        workers: Sequence[Worker],
        steps: tuple[Step, ...],
        now: float,
        trigger: Trigger = Trigger.STOPPED,
    ) -> list[Action]:
        """End these workers as Workers.stop() does, when their stacks were taken, or after TIME."""
        if not workers:
            return []
        if not self._awaited or now >= self._until:
            self.cancel()
            self._until = now + TIME
        self._number += 1
        delay = round(self._until - now, 6)
        delayed = tuple(Step(step.signal, delay + step.after) for step in steps)
        stops = self._workers.stop(workers, delayed, now, trigger)
        self._awaited.update((stop.host, self._number) for stop in stops)
        self._orders.append(_Order(workers, steps))
        takes = [TakeStacks(stop.host, self._number, stop.slots or ()) for stop in stops]
        return [*takes, *stops]

    def taken(self, host: str, number: int, now: float) -> list[Stop]:
        """A host's stacks are there, or there will be none of it."""
        if (host, number) not in self._awaited:
            return []
        self._awaited.discard((host, number))
        if self._awaited:
            return []
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
        """Other orders take the place of those that wait."""
        self._awaited.clear()
        self._orders.clear()
