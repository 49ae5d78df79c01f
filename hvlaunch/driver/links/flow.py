"""The flow of one host's frames: acknowledged frames, the queues of outgoing frames, and credit for output."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Generic, TypeVar

from hvlaunch.agent.wire.frames import FRAME_COST

__all__ = ["AckedFrames", "Credit", "Outgoing"]


_MOST_BEYOND = 1 << 14


class AckedFrames:
    """Frames of the lasting stream that the agent need not repeat, by number from 1. For any thread.

    Frames are acked in any order (an event when recorded, output when written); agents hear of the longest unbroken
    run from 1, `prefix`. A frame that is not acked for very long, as when stdout has no reader, is given up.
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
                # A bound on memory: the frames in the gap are given up.
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
    """Two queues of frames to a host. put() never blocks; all methods are for any thread.

    Relayed frames and other frames keep their own order and take turns: neither kind delays the other for long.
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
        """Remove and return the waiting frames, without relayed frames."""
        with self._changed:
            frames = list(self._own)
            self._own.clear()
            return frames

    def close(self) -> None:
        """Accept no more frames: get() returns the waiting frames, and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_relayed(self, most: int) -> None:
        """Block until at most `most` relayed frames wait, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._relayed) <= most or self._closed)

    def get(self) -> T | None:
        """Wait for the next frame; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._own or self._relayed or self._closed)
            if not self._own and not self._relayed:
                return None
            # Turns, since a flood of relayed data would otherwise delay an order to stop.
            is_own = bool(self._own) and (self._own_turn or not self._relayed)
            self._own_turn = not is_own
            self._changed.notify_all()
            return (self._own if is_own else self._relayed).popleft()


class Credit:
    """Credit for processed output, sent to the agent in large portions. For any thread; `give` sends credit."""

    # Portions, since a frame for each line would double the number of writes.

    def __init__(self, window: int, give: Callable[[int], None]) -> None:
        self._portion = window // 4
        self._give = give
        self._lock = Lock()
        self._due = 0

    def add(self, size: int) -> None:
        """Count a processed frame with `size` bytes of output."""
        with self._lock:
            self._due += size + FRAME_COST
            if self._due >= self._portion:
                self._give(self._due)
                self._due = 0
