"""The interface of a connection to a host, and the stages of making one."""

import threading
from collections.abc import Callable
from typing import Literal, Protocol

__all__ = ["Channel", "Connection", "Stage", "listen", "stage"]


class Channel(Protocol):
    """One command running on the host, its stdin and stdout as raw bytes."""

    def read(self) -> bytes:
        """Next bytes of the command's stdout, as many as are there; b"" at its end. Blocks.

        Raises OSError where the connection broke.
        """

    def write(self, data: bytes) -> None:
        """Send all of `data` to the command's stdin. Blocks while the host does not take it.

        Raises OSError where the connection broke or the command is gone.
        """

    def stderr(self) -> bytes:
        """The last bytes (at most 16 KiB) that the command wrote to stderr so far."""

    def exit_status(self, timeout: float) -> int | None:
        """The command's exit status, 128 + n for a signal n; None if not known within `timeout` seconds."""

    def close(self) -> None:
        """Give the command up; unblocks read() and write() in other threads. Never raises, may be repeated."""


class Connection(Protocol):
    """An open, authenticated way to one host."""

    local_address: str | None
    """Our own end, which is how the host, or the first machine on the way to it, sees the driver.

    Empty where it is not known; None where the host is this machine.
    """

    remote_address: str | None
    """The host's end; empty where it is not known (behind a jump host); None where the host is this machine."""

    is_near: bool
    """Whether the host is known to be so near that tens of kilobytes more cost no time."""

    def run(self, command: str) -> Channel:
        """Start `command` through the login shell of the host (of this machine: /bin/sh).

        Raises HostError.
        """

    def silence(self) -> float | None:
        """Seconds since the first machine on the way acknowledged something; None where that is not known."""

    def close(self) -> None:
        """Close it and its channels; unblocks threads in them. Never raises, may be repeated."""


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
