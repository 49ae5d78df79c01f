"""How a worker tells how far it is: `progress(120, total=1000, loss=0.31)`. docs/rendezvous.md has the form for other languages."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import isfinite
from operator import index
from typing import Protocol, SupportsFloat, SupportsIndex

__all__ = ["LONGEST_NAME", "MOST_METRICS", "PROGRESS", "Teller", "progress"]

PROGRESS = "hvlaunch.progress"
"""The scope of what workers tell, by worker."""
MOST_METRICS = 32
LONGEST_NAME = 64

_PAUSE = 0.5
"""Seconds between two messages."""
_LATE = 1.0
"""Seconds after which the newest step is told, though no other has followed; more than _PAUSE."""


class _Tells(Protocol):
    def tell(
        self, step: SupportsIndex, total: SupportsIndex | None, metrics: Mapping[str, SupportsFloat]
    ) -> None: ...


def progress(step: SupportsIndex, total: SupportsIndex | None = None, **metrics: SupportsFloat) -> None:
    """Tell hvlaunch how many steps this worker has made, of how many in all, and a few numbers, such as the loss.

    It takes a microsecond and never waits: a thread sends the newest twice a second at most, and only then are metrics
    read. Not under hvlaunch it does nothing. Raises TypeError and ValueError for what is no number.
    """
    global _teller  # noqa: PLW0603 (a process has one)
    if _teller is None:
        _teller = _new_teller()
    _teller.tell(step, total, metrics)


class Teller:
    """Tells by `put`, in a thread that ends with the process; what that raises is its own affair."""

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
        """As progress()."""
        newest = index(step), None if total is None else index(total)
        now = self._clock()
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
            told = self._newest
            step, total = told
            self._put(json.dumps({"step": step, "total": total, "metrics": self._metrics}).encode("ascii"))
            if not self._has_news.wait(_LATE) and self._newest == told:
                self._has_news.wait()


class _Silent:
    """Nobody is there who would hear it."""

    def tell(self, step: object, total: object, metrics: object) -> None:
        pass


_teller: _Tells | None = None


def _new_teller() -> _Tells:
    worker = os.environ.get("HVLAUNCH_WORKER")
    if not worker or not os.environ.get("HVLAUNCH_RENDEZVOUS") or not os.environ.get("HVLAUNCH_TOKEN"):
        return _Silent()
    from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (the driver, which tells nothing, needs none)
    from hvlaunch.rendezvous.client_errors import RendezvousError  # noqa: PLC0415 (as above)

    client = Client.from_environment()

    def put(message: bytes) -> None:
        with suppress(RendezvousError):  # training goes on all the same; the next step may be told
            client.put(PROGRESS, worker, message)

    return Teller(put)


def _numbers(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """JSON knows finite numbers alone. Raises TypeError, ValueError."""
    if len(metrics) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in metrics):
        raise ValueError(f"at most {MOST_METRICS} metrics, with names of at most {LONGEST_NAME} letters")
    found = {name: float(value) for name, value in metrics.items()}
    return {name: value if isfinite(value) else None for name, value in found.items()}


def _forget() -> None:
    """A child that was forked has no thread that tells."""
    global _teller  # noqa: PLW0603 (as above)
    _teller = None


os.register_at_fork(after_in_child=_forget)
