"""Which of an agent's frames need not be sent again, whatever becomes of this driver."""

import threading
from collections.abc import Iterable

__all__ = ["DurableFrames"]

_MOST_BEYOND = 1 << 14


class DurableFrames:
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
