"""Frames on their way to one host."""

import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Outgoing"]

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
