"""Reading what the kernel may keep one waiting for."""

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, TypeVar

    T = TypeVar("T")

__all__ = ["in_time"]


def in_time(work: "Callable[[], T]", seconds: float, otherwise: "T") -> "T":
    """What `work` returns; `otherwise` where that takes longer, or no thread can be started.

    For what is read of another process's memory (/proc/PID/cmdline, environ, maps): it waits as long as that process
    changes its own map of it, which one that forks does, and which may be for ever where it is stuck in the kernel.
    """
    results: "List[T]" = []
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def run() -> None:
        results.append(work())
        is_done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return otherwise
    return results[0] if is_done.acquire(timeout=seconds) else otherwise
