"""How far a connection is, for those who wait for it: a thread that makes one may have a listener."""

import threading
from collections.abc import Callable
from typing import Literal

__all__ = ["Stage", "listen", "stage"]

Stage = Literal["resolve", "connect", "log in", "passphrase"]

_of_thread = threading.local()


def listen(listener: Callable[[Stage], None]) -> None:
    """Be told of the stages of all connections that this thread makes."""
    _of_thread.listener = listener


def stage(name: Stage) -> None:
    """Tell who listens what the thread does now."""
    listener = getattr(_of_thread, "listener", None)
    if listener is not None:
        listener(name)
