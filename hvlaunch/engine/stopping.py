"""How workers are ended: by which signals and when, and whether an end is one that we caused. Pure."""

import signal
from collections.abc import Sequence

from hvlaunch.engine.actions import Step
from hvlaunch.engine.events import WorkerExited

__all__ = ["AT_ONCE", "Orders", "gently", "passing_on"]

AT_ONCE = (Step(signal.SIGKILL, 0.0),)

_PATIENCE = 10.0
"""Seconds after the last signal in which a worker must have ended."""


def gently(grace: float, after: float = 0.0) -> tuple[Step, ...]:
    """SIGTERM, and SIGKILL when the grace is over."""
    return Step(signal.SIGTERM, after), Step(signal.SIGKILL, after + grace)


def passing_on(interrupt: int, grace: float) -> tuple[Step, ...]:
    """The same after an interrupt: SIGINT is tried first, for half of the grace, where it was that."""
    if interrupt != signal.SIGINT:
        return gently(grace)
    return Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, grace / 2), Step(signal.SIGKILL, grace)


class Orders:
    """What a worker is sent so that it ends. Times are seconds of the driver's clock."""

    def __init__(self) -> None:
        self.is_by_agent = False
        """Whether its agent stops it on its own account, and began with that before we heard of it."""
        self._first_at: float | None = None
        self._signals: set[int] = set()
        self._killed_at: float | None = None
        """When it was, or is, to be sent SIGKILL."""

    def add(self, steps: Sequence[Step], now: float) -> float | None:
        """Note that these steps, which replace those of an earlier order, were ordered now.

        Returns when the worker must have ended; None if it was sent SIGKILL before, and gets no more time.
        """
        first, last = now + steps[0].after, now + steps[-1].after
        is_killed = self._killed_at is not None and now >= self._killed_at
        self._first_at = first if self._first_at is None else min(self._first_at, first)
        self._signals.update(step.signal for step in steps)
        kills = [now + step.after for step in steps if step.signal == signal.SIGKILL]
        self._killed_at = min((at for at in (self._killed_at, *kills) if at is not None), default=None)
        return None if is_killed else last + _PATIENCE

    def had_begun(self, at: float) -> bool:
        """Whether the worker was sent anything by then."""
        return self._first_at is not None and at >= self._first_at

    def caused(self, event: WorkerExited) -> bool:
        """Whether the worker ended for them: after our signals, by one of them, or well. A SIGKILL before ours was another's."""
        if self._first_at is None:
            return False
        is_ours = self.is_by_agent or (self._killed_at is not None and event.at >= self._killed_at)
        signals = self._signals - {signal.SIGKILL} | ({signal.SIGKILL} if is_ours else set())
        is_by_signal = event.signal in signals or (event.code or 0) - 128 in signals
        if event.at < self._first_at:
            return self.is_by_agent and is_by_signal
        return is_by_signal or event.code == 0
