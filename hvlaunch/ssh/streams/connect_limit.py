"""Not too many at one address: a few handshakes at a time for each address, and again for those sent away.

sshd's MaxStartups (10:30:100 by default) drops connections at random where many wait to be authenticated.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import random as any_random
from typing import TypeVar

from hvlaunch.errors import SentAway, StartTimeout

__all__ = ["ConnectLimit"]

T = TypeVar("T")

_TRIES = 10
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0


class ConnectLimit:
    """At most `limit` connections are being made to one address at a time. Thread-safe.

    `random` gives numbers from 0 to 1, `clock` and `sleep` are those of the time module.
    """

    def __init__(
        self,
        limit: int,
        *,
        random: Callable[[], float] = any_random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._limit = limit
        self._random = random
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rooms: dict[str, threading.Semaphore] = {}

    def run(self, address: str, attempt: Callable[[], T], *, host: str, deadline: float) -> T:
        """Make an attempt once the limit allows it, and return what it returns; after SentAway, again after a pause.

        The pauses double, and each is cut at random, so that those who were sent away together come
        back apart. `host` is for messages. Raises StartTimeout, and whatever `attempt` raises, SentAway
        after ten times or at the deadline.
        """
        longest = _FIRST_PAUSE
        for _ in range(_TRIES - 1):
            try:
                with self._room(address, host, deadline):
                    return attempt()
            except SentAway:
                pause = longest * self._random()
                if self._clock() + pause >= deadline:
                    raise
            self._sleep(pause)
            longest = min(_LONGEST_PAUSE, longest * 2)
        with self._room(address, host, deadline):
            return attempt()

    @contextmanager
    def _room(self, address: str, host: str, deadline: float) -> Iterator[None]:
        with self._lock:
            rooms = self._rooms.setdefault(address, threading.Semaphore(self._limit))
        if not rooms.acquire(timeout=max(0.0, deadline - self._clock())):
            raise StartTimeout(
                f"too many other connections to {address} were being made at the same time",
                host=host,
                hint=f"a longer --start-timeout, or a --connect-limit larger than {self._limit}",
            )
        try:
            yield
        finally:
            rooms.release()
