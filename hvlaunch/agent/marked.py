"""Ending what earlier workers of a slot have left, while other workers live."""

from __future__ import annotations

import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent.in_time import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence, Set

__all__ = ["kill_marked"]

_PAUSE = 0.0005


def kill_marked(marks: Sequence[bytes], patience: float) -> None:
    """SIGKILL the descendants that have one of these NAME=VALUE in the environment that they were started with, and theirs.

    They are reaped too, or at least killed, when `patience` seconds are over; other children are not reaped. Where it takes
    longer to find them, a thread goes on: no later worker has these marks.
    """

    def is_marked(pid: int) -> bool:
        try:
            with open("/proc/%d/environ" % pid, "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            return False  # ended, or another user's
        return any(mark in variables for mark in marks)

    def kill() -> None:
        deadline = time.monotonic() + patience
        left: Set[int] = set()
        while True:
            left.update(reaper.stop_and_kill(deadline, is_marked))
            left = {pid for pid in left if not _is_gone(pid)}
            if not left or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE)

    in_time(kill, patience, None)


def _is_gone(pid: int) -> bool:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not os.path.exists("/proc/%d" % pid)
