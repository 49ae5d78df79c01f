"""What a driver leaves for the next one in the care of its minder: a socket that nobody else may listen at meanwhile."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["Care", "inherited"]


class Care:
    """What a driver leaves in its minder's care for the next driver: the socket where its page is served. Thread-safe."""

    def __init__(self, channel: socket.socket | None = None, listener: socket.socket | None = None) -> None:
        """Of a driver that was started with these."""
        self._channel = channel
        self._kept: socket.socket | None = None
        self._lock = threading.Lock()
        self.listener = listener
        """What the driver before has left, if it has."""

    def reach(self, channel: socket.socket) -> None:
        """There is a minder."""
        with self._lock:
            self._channel = channel
            self._send()

    def keep(self, listener: socket.socket) -> None:
        """Leave this, as soon as there is a minder; who need not take it before this process has ended."""
        with self._lock:
            self._kept = listener
            self._send()

    def _send(self) -> None:
        if self._channel is not None and self._kept is not None:
            with suppress(OSError, ValueError):  # the minder was killed, or the job is over
                socket.send_fds(self._channel, [b"\0"], [self._kept.fileno()], socket.MSG_DONTWAIT)


def inherited(descriptors: Sequence[str]) -> list[socket.socket]:
    """The sockets that this process was started with, for itself alone. Raises OSError, ValueError."""
    found = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    for one in found:
        one.set_inheritable(False)
    return found
