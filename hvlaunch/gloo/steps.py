"""By which signals workers are ended, and when. Pure."""

import signal

from hvlaunch.gloo.actions import Step

__all__ = ["AT_ONCE", "gently", "passing_on"]

AT_ONCE = [Step(signal.SIGKILL, 0.0)]


def gently(grace: float, after: float = 0.0) -> list[Step]:
    """SIGTERM, and SIGKILL when the grace is over."""
    return [Step(signal.SIGTERM, after), Step(signal.SIGKILL, after + grace)]


def passing_on(interrupt: int, grace: float) -> list[Step]:
    """The same after an interrupt: SIGINT is tried first, for half of the grace, where it was that."""
    if interrupt != signal.SIGINT:
        return gently(grace)
    return [Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, grace / 2), Step(signal.SIGKILL, grace)]
