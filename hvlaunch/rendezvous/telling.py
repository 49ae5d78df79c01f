"""Progress reports of workers: `progress(120, total=1000, loss=0.31)`. docs/interfaces/rendezvous-http.md has the format for other languages."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from operator import index
from typing import Protocol, SupportsFloat, SupportsIndex

__all__ = ["LONGEST_NAME", "MOST_METRICS", "PROGRESS", "Teller", "new_teller", "progress"]

PROGRESS = "hvlaunch.progress"
"""The scope of progress reports, by worker."""
MOST_METRICS = 32
LONGEST_NAME = 64

_PAUSE = 0.5
"""Seconds between two messages."""
_LATE = 1.0
"""Seconds after which the newest step is sent without a successor; more than _PAUSE."""


class _Tells(Protocol):
    def tell(
        self, step: SupportsIndex, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None: ...


def progress(step: SupportsIndex, total: SupportsIndex | None = None, **metrics: SupportsFloat) -> None:
    """Report this worker's step, the total number of steps, and some numbers, such as the loss.

    A call takes a microsecond and never waits: a thread sends the newest report twice a second at most, and only then are
    metrics read. Without hvlaunch a call does nothing. Raises TypeError and ValueError for values without a number.
    """
    global _teller  # noqa: PLW0603 (a process has one)
    if _teller is None:
        _teller = new_teller(PROGRESS)
    _teller.tell(step, total, metrics)


class Teller:
    """Sends reports with `put` from a daemon thread; errors of `put` are its own affair."""

    def __init__(self, put: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._put = put
        self._clock = clock
        self._due = 0.0
        self._newest: tuple[int, int | None] = 0, None
        self._metrics: Mapping[str, float | None] = {}
        self._has_news = threading.Event()
        threading.Thread(target=self._run, name="hvlaunch progress", daemon=True).start()

    def tell(
        self, step: SupportsIndex, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None:
        """Take a report, as progress() does."""
        newest = index(step), None if total is None else index(total)
        now = self._clock()
        # Metrics may live on a GPU: reading them is left to the calls whose report is sent.
        if now >= self._due:
            self._metrics = _numbers(metrics)
            self._due = now + _PAUSE
            self._newest = newest
            self._has_news.set()
        else:
            self._newest = newest

    def _run(self) -> None:
        self._has_news.wait()
        while True:
            self._has_news.clear()
            sent = self._newest
            step, total = sent
            self._put(json.dumps({"step": step, "total": total, "metrics": self._metrics}).encode("ascii"))
            # The last step of a burst must arrive too, even without a following step.
            if not self._has_news.wait(_LATE) and self._newest == sent:
                self._has_news.wait()


class _Silent:
    """Ignores reports: no driver listens."""

    def tell(self, step: object, total: object, metrics: object) -> None:
        pass


_teller: _Tells | None = None


def new_teller(scope: str, prefix: str = "") -> _Tells:
    """Return a teller for this worker's key in the scope, behind `prefix`; a silent one outside of hvlaunch."""
    # Missing outside of hvlaunch, where progress() may be called too.
    worker = os.environ.get("HVLAUNCH_WORKER")
    if not worker or not os.environ.get("HVLAUNCH_RENDEZVOUS") or not os.environ.get("HVLAUNCH_TOKEN"):
        return _Silent()
    from hvlaunch.rendezvous import RendezvousError  # noqa: PLC0415 (as above)
    from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (the driver, which tells nothing, needs none)

    client = Client.from_environment()

    def put(message: bytes) -> None:
        with suppress(RendezvousError):  # training must go on; the next step may get through
            client.put(scope, prefix + worker, message)

    return Teller(put)


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """Return the metrics for JSON, which has only finite numbers. Raises TypeError, ValueError."""
    if len(metrics) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in metrics):
        raise ValueError(f"at most {MOST_METRICS} metrics, with names of at most {LONGEST_NAME} letters")
    numbers = {name: float(value) for name, value in metrics.items()}
    return {name: value if isfinite(value) else None for name, value in numbers.items()}


def _forget() -> None:
    """Start anew in a forked child, which lacks the thread."""
    global _teller  # noqa: PLW0603 (as above)
    _teller = None


os.register_at_fork(after_in_child=_forget)
