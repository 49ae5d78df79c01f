"""The newest events of a running job as numbered records, for clients of the control socket."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.engine.actions import Action
    from hvlaunch.engine.events import Event
    from hvlaunch.watch.overview import Totals

    See = Callable[[Event, Sequence[Action], float], None]
    MakeRecorder = Callable[[Callable[[Mapping[str, object]], None], Callable[[], float]], See]
    """Makes a watcher that passes records to the first function; the second returns the time since the epoch."""

__all__ = ["History", "Page"]

_KEPT = 10_000
_UNREAD = 1_000
_PAGE = 1_000
_FOLLOWING = 1.0
"""Most seconds between two requests of a client that follows the job."""


class Page(NamedTuple):
    """Records in order, as JSON, and the number of the next record."""

    records: tuple[bytes, ...]
    next: int
    missed: int
    """Number of requested records that are not kept any more."""


class History:
    """Keeps events, and makes records of them. The driver's thread adds events; any thread may read. Numbers begin with 0.

    Records are made late, when a client asks or when too many events wait: most jobs have no client.
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
        """Number after the last record that a client has read."""
        self._asked_at: float | None = None
        self._waiting: dict[object, Callable[[], None]] = {}

    def watch(self, event: Event, actions: Sequence[Action], now: float) -> None:
        """Add an event at `now`, with the engine's actions. A watcher of the driver."""
        waiting: list[Callable[[], None]] = []
        with self._lock:
            self._unread.append((event, actions, now, self._wall()))
            # A local job must not pay for records that no client reads.
            if self._waiting or len(self._unread) > _UNREAD:
                before = self._count
                self._read()
                if self._count > before:
                    waiting = [*self._waiting.values()]
                    self._waiting.clear()
        # Outside the lock: a call may ask for records, which takes it.
        for call in waiting:
            call()

    @property
    def next(self) -> int:
        """Number of the next record."""
        with self._lock:
            self._read()
            return self._count

    def since(self, number: int) -> Page:
        """Return the records from this number on, at most a page."""
        with self._lock:
            self._read()
            first = self._count - len(self._records)
            # Older records have been dropped: the client learns how many.
            begin = max(number, first)
            records = list(self._records)[begin - first : begin - first + _PAGE]
            self._given = max(self._given, begin + len(records))
            self._asked_at = self._clock()
            self._lock.notify_all()
        return Page(tuple(records), begin + len(records), begin - number)

    def when_longer(self, number: int, call: Callable[[], None]) -> Callable[[], None]:
        """Call `call` once, from any thread, as soon as a record has this number. Return a function that cancels this."""
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
        """Return the totals of the job so far."""
        with self._lock:
            return self._read().at(self._clock())

    def close(self) -> None:
        """The job has ended: give a client that follows it some time to read the last records."""
        with self._lock:
            # A job that is not followed ends at once.
            if self._asked_at is not None and self._clock() - self._asked_at < _FOLLOWING:
                self._lock.wait_for(lambda: self._given >= self._count and not self._unread, _FOLLOWING)

    def _call_off(self, key: object) -> None:
        with self._lock:
            self._waiting.pop(key, None)

    def _read(self) -> Totals:
        """Make records and totals of the events that wait. Needs the lock."""
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
