"""The interface of a connection to a host, and the stages of connecting."""

import threading
from collections.abc import Callable
from typing import Literal, Protocol

__all__ = ["Channel", "Connection", "Stage", "listen", "stage"]


class Channel(Protocol):
    """A command that runs on the host, with stdin and stdout as raw bytes."""

    def read(self) -> bytes:
        """Return the available bytes of stdout, or b"" at its end. Blocks.

        Raises OSError if the connection broke.
        """

    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin. Blocks while the host does not take it.

        Raises OSError if the connection broke or the command has ended.
        """

    def stderr(self) -> bytes:
        """Return the last bytes of stderr, at most 16 KiB."""

    def exit_status(self, timeout: float) -> int | None:
        """Return the exit status, or 128 + n for signal n; None if unknown after `timeout` seconds."""

    def close(self) -> None:
        """Give up the command and unblock read() and write() in other threads. Never raises; may be repeated."""


class Connection(Protocol):
    """An open, authenticated connection to one host."""

    local_address: str | None
    """The local address, as the host or the first jump host sees it.

    Empty if unknown; None if the host is this machine.
    """

    remote_address: str | None
    """The host's address; empty if unknown (behind a jump host); None if the host is this machine."""

    is_near: bool
    """True if the host is known to be near: then tens of kilobytes more cost no time."""

    def run(self, command: str) -> Channel:
        """Start `command` in the login shell of the host (on this machine: /bin/sh).

        Raises HostError.
        """

    def silence(self) -> float | None:
        """Return seconds since the first machine on the way acknowledged data; None if unknown."""

    def close(self) -> None:
        """Close the connection and its channels; unblocks threads in them. Never raises; may be repeated."""


Stage = Literal["resolve", "connect", "log in", "passphrase"]

# By thread, because each connection is made in its own thread, and deep callees report stages too.
_of_thread = threading.local()


def listen(listener: Callable[[Stage], None]) -> None:
    """Report the stages of all connections made in this thread to `listener`."""
    _of_thread.listener = listener


def stage(name: Stage) -> None:
    """Report the current stage of this thread to its listener."""
    listener = getattr(_of_thread, "listener", None)
    if listener is not None:
        listener(name)
