"""Calls that are due at a time: one thread, as long as there are any."""

import threading
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

__all__ = ["Agenda"]


class Agenda:
    """For any thread. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._has_thread = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have it called then, or soon after. It must not wait for anything."""
        with self._changed:
            heappush(self._calls, (when, next(self._numbers), call))
            self._changed.notify()
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="agenda", daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._calls:
                left = self._calls[0][0] - self._clock()
                if left <= 0:
                    return heappop(self._calls)[2]
                self._changed.wait(left)
            self._has_thread = False
            return None
