"""Which of an agent's frames need not be sent again, whatever becomes of this driver."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Generic, TypeVar

from hvlaunch.agent.wire.frames import FRAME_COST

__all__ = ["AckedFrames", "Credit", "Outgoing"]


_MOST_BEYOND = 1 << 14


class AckedFrames:
    """Those of the lasting stream, by their numbers, which begin with 1. For any thread.

    Frames become durable in any order (an event in the journal, output when it was written), and agents are told
    up to which number all are: `prefix`. If one is not for very long, as when nobody reads stdout, it is given up.
    """

    def __init__(self, prefix: int = 0, beyond: Iterable[int] = ()) -> None:
        self.prefix = prefix
        self._beyond = {number for number in beyond if number > prefix}
        self._lock = threading.Lock()
        self._close_up()

    def __contains__(self, number: int) -> bool:
        with self._lock:
            return number <= self.prefix or number in self._beyond

    def add(self, number: int) -> None:
        with self._lock:
            if number == self.prefix + 1:
                self.prefix = number
            elif number > self.prefix:
                self._beyond.add(number)
                if len(self._beyond) > _MOST_BEYOND:
                    self.prefix = min(self._beyond)
            if self._beyond:
                self._close_up()

    def _close_up(self) -> None:
        self._beyond.discard(self.prefix)
        while self.prefix + 1 in self._beyond:
            self.prefix += 1
            self._beyond.remove(self.prefix)


T = TypeVar("T")


class Outgoing(Generic[T]):
    """put() never blocks, the others wait; all from any thread.

    Relayed frames and all others keep their own order and take turns, so neither waits long for the other.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._own: deque[T] = deque()
        self._relayed: deque[T] = deque()
        self._own_turn = True
        self._closed = False

    def put(self, frame: T, *, relayed: bool = False) -> None:
        with self._changed:
            (self._relayed if relayed else self._own).append(frame)
            self._changed.notify_all()

    def take_all(self) -> list[T]:
        """What waits, but for relayed frames; it does not wait any more."""
        with self._changed:
            found = list(self._own)
            self._own.clear()
            return found

    def close(self) -> None:
        """No more: get() gives the rest, and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_relayed(self, most: int) -> None:
        """Until at most so many relayed frames wait here, or no more are put."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._relayed) <= most or self._closed)

    def get(self) -> T | None:
        """The next frame; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._own or self._relayed or self._closed)
            if not self._own and not self._relayed:
                return None
            own = bool(self._own) and (self._own_turn or not self._relayed)
            self._own_turn = not own
            self._changed.notify_all()
            return (self._own if own else self._relayed).popleft()


class Credit:
    """For any thread: the printer's, and the link's own for what functions return. `give` sends so much to the agent."""

    def __init__(self, window: int, give: Callable[[int], None]) -> None:
        self._portion = window // 4
        self._give = give
        self._lock = Lock()
        self._due = 0

    def add(self, size: int) -> None:
        """A frame with so many bytes of output was dealt with."""
        with self._lock:
            self._due += size + FRAME_COST
            if self._due >= self._portion:
                self._give(self._due)
                self._due = 0
