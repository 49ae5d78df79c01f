"""What has happened in a job, for those who ask while it runs: the newest records, with their numbers."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hvlaunch.engine.actions import Action
    from hvlaunch.engine.events import Event
    from hvlaunch.watch.overview import Totals

    See = Callable[[Event, Sequence[Action], float], None]
    MakeRecorder = Callable[[Callable[[Mapping[str, object]], None], Callable[[], float]], See]
    """Makes what sees all and hands a record of it to the first function; the second has the time, as the epoch counts."""

__all__ = ["History", "Page"]

_KEPT = 10_000
_UNREAD = 1_000
_PAGE = 1_000
_FOLLOWING = 1.0
"""Seconds between two requests of somebody who follows a job, at most."""


class Page(NamedTuple):
    """Some records in their order, as JSON, and the number of the one that comes next."""

    records: tuple[bytes, ...]
    next: int
    missed: int
    """How many that were asked for are not kept any more."""


class History:
    """Sees all in the driver's thread; any thread may read. The first record has number 0. `clock` is the driver's.

    Records are made when somebody wants them, or when there would be too many to make: most jobs are asked by nobody.
    """

    def __init__(
        self,
        make_recorder: MakeRecorder,
        kept: int = _KEPT,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_recorder = make_recorder
        self._record: See | None = None
        self._totals: Totals | None = None
        self._wall = wall
        self._clock = clock
        self._seen_at = 0.0
        self._lock = threading.Condition()
        self._unread: list[tuple[Event, Sequence[Action], float, float]] = []
        self._records: deque[bytes] = deque(maxlen=kept)
        self._count = 0
        self._given = 0
        """The number behind the last record that was read."""
        self._asked_at: float | None = None
        self._waiting: dict[object, Callable[[], None]] = {}

    def watch(self, event: Event, actions: Sequence[Action], now: float) -> None:
        """An event at `now`, and what the engine made of it."""
        waiting: list[Callable[[], None]] = []
        with self._lock:
            self._unread.append((event, actions, now, self._wall()))
            if self._waiting or len(self._unread) > _UNREAD:
                before = self._count
                self._read()
                if self._count > before:
                    waiting = [*self._waiting.values()]
                    self._waiting.clear()
        for call in waiting:
            call()

    def since(self, number: int) -> Page:
        """The records from this number on, a page of them at most."""
        with self._lock:
            self._read()
            first = self._count - len(self._records)
            begin = max(number, first)
            records = list(self._records)[begin - first : begin - first + _PAGE]
            self._given = max(self._given, begin + len(records))
            self._asked_at = self._clock()
            self._lock.notify_all()
        return Page(tuple(records), begin + len(records), begin - number)

    def when_longer(self, number: int, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` once, from any thread, when there is a record that has this number or a later one; at once if there is.

        Returns what calls that off.
        """
        key = object()
        with self._lock:
            self._read()
            is_there = self._count > number
            if not is_there:
                self._waiting[key] = call
        if is_there:
            call()
        return lambda: self._call_off(key)

    def totals(self) -> Mapping[str, Any]:
        """What the job comes to so far."""
        with self._lock:
            return self._read().at(self._clock())

    def close(self) -> None:
        """The job has ended: whoever follows it gets some time to read the last records."""
        with self._lock:
            if self._asked_at is not None and self._clock() - self._asked_at < _FOLLOWING:
                self._lock.wait_for(lambda: self._given >= self._count and not self._unread, _FOLLOWING)

    def _call_off(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def _read(self) -> Totals:
        """Make the records of what was seen, and count it; under the lock."""
        if self._record is None or self._totals is None:
            from hvlaunch.watch.overview import Totals  # noqa: PLC0415 (when somebody asks)

            self._record = self._make_recorder(self._write, lambda: self._seen_at)
            self._totals = Totals()
        unread, self._unread = self._unread, []
        for event, actions, now, self._seen_at in unread:
            self._record(event, actions, now)
            self._totals.watch(event, actions, now)
        return self._totals

    def _write(self, record: Mapping[str, object]) -> None:
        self._records.append(json.dumps(record).encode())
        self._count += 1
