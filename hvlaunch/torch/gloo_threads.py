"""Gloo's own threads, of which Python knows nothing.

Such a thread tells that a collective is done, and only then gives back its tensors, for which it takes Python's lock. Where
Python is ending by then, that is an abort ("terminate called without an active exception"); and whoever waits for the
thread with the lock held, as the end of a DistributedDataParallel does, waits for ever.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["wait_until_idle"]

_NAME = "pt_gloo_runloop"
_LIMIT = 5.0
_TASKS = Path("/proc/self/task")


def wait_until_idle(
    *, tasks: Path = _TASKS, sleep: Callable[[float], object] = time.sleep, limit: float = _LIMIT
) -> bool:
    """Wait until no thread of Gloo's is at work, `limit` seconds at most; whether it came to that.

    True at once where the kernel has no /proc. One that waits for Python's lock wakes in each of Python's switch
    intervals; so one that sleeps, and has not woken over some of them, waits for work.
    """
    pause = 4 * sys.getswitchinterval()
    before = None
    for _ in range(round(limit / pause)):
        now = _wakes(tasks)
        if not now or (now == before and None not in now.values()):
            return True
        before = now
        sleep(pause)
    return False


def _wakes(tasks: Path) -> dict[str, int | None]:
    """By thread, how often it has been put to sleep, or None while it runs."""
    found: dict[str, int | None] = {}
    for task in tasks.glob("*/status"):
        try:
            lines = task.read_text().splitlines()
        except OSError:  # a thread that ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _NAME:
            sleeps = status["State"].startswith("S")
            found[task.parent.name] = int(status["voluntary_ctxt_switches"]) if sleeps else None
    return found
