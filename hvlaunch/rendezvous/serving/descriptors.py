"""Where no file descriptor is left for another client."""

import errno
import resource
from collections.abc import Callable

__all__ = ["KEPT", "REST", "Shortage", "is_shortage"]

REST = 0.1
"""Seconds until the next look for one."""
KEPT = 8
"""Descriptors that are kept for the event loop and what it loads: whoever takes all others, it can begin."""
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def is_shortage(error: OSError) -> bool:
    """Whether it comes from a lack of descriptors or memory, and may be over soon."""
    return error.errno in _NONE_LEFT


class Shortage:
    """Raises this process's limit as long as it may, and then tells the user, once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._is_told = False

    def relieve(self) -> bool:
        """Whether there can be more descriptors now."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            raised = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return True
        if not self._is_told:
            self._is_told = True
            self._say(
                f"no file descriptor is left in hvlaunch (the limit is {hard}): clients of the rendezvous wait; "
                "try: a higher limit (ulimit -n)"
            )
        return False
