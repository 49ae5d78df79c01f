"""Where a server listens: one port, at as few addresses as its clients need."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from hvlaunch.rendezvous.client_errors import CannotListen

__all__ = ["EVERYWHERE", "Listeners", "listen_again"]

EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 (these are recognized, not chosen)

_BOTH = ("", "::")
_BACKLOG = 1024
_PATIENCE = 2.0  # seconds for a process that was killed to be gone


class Listeners:
    """Sockets that listen at the same port; the first at `host`, "" being every address. Port 0 is a free one.

    A free port is kept at all addresses from the start, so that it can be listened at by more of them later.
    Raises CannotListen.
    """

    def __init__(self, host: str, port: int) -> None:
        self._kept: socket.socket | None = None
        asked = port
        if port == 0 and host not in EVERYWHERE:
            self._kept = _bind("", 0)  # it never listens
            port = self._kept.getsockname()[1]
        try:
            first = _listener(host, port, asked)
        except BaseException:
            self.close_kept()
            raise
        self.port: int = first.getsockname()[1]
        self.sockets = {host: first}

    def add(self, host: str) -> socket.socket | None:
        """Listen there, too; None where that is so already. Raises CannotListen."""
        if host in self.sockets or any(everywhere in self.sockets for everywhere in EVERYWHERE):
            return None
        listener = self.sockets[host] = _listener(host, self.port, self.port)
        return listener

    def close_kept(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def close(self) -> None:
        self.close_kept()
        for listener in self.sockets.values():
            listener.close()


def listen_again(host: str, port: int, others: Iterable[str], say: Callable[[str], None]) -> Listeners:
    """As an earlier server of this user did: at `host`, and at the others where this machine still has them.

    That server's process may still be ending, so a port in use is tried again for a while. Raises CannotListen.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            listeners = Listeners(host, port)
            break
        except CannotListen as error:
            if not _is_in_use(error) or time.monotonic() >= deadline:
                raise
        time.sleep(0.02)
    try:
        for other in others:
            try:
                listeners.add(other)
            except CannotListen as error:  # noqa: PERF203 (there are few)
                if _is_in_use(error):
                    raise
                say(f"warning: {error.cause}")
    except BaseException:
        listeners.close()
        raise
    return listeners


def _is_in_use(error: CannotListen) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE


def _listener(host: str, port: int, asked: int) -> socket.socket:
    """Raises CannotListen, which names the port that was asked for."""
    try:
        listener = _bind(host, port)
        try:
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        # The system's own words where it has some: getaddrinfo's numbers are its own.
        number = error.errno or 0
        cause = os.strerror(number) if number > 0 else error.strerror
        raise CannotListen(cause or str(error), host=host, port=asked) from error
    # Connections inherit it. asyncio alone would leave it unset: it looks for a protocol number that is 0 here.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _bind(host: str, port: int) -> socket.socket:
    """For both families where host is "" or "::" and the kernel has IPv6, else for the host's first address."""
    family: int
    address: tuple[Any, ...]
    if host not in _BOTH:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    elif socket.has_dualstack_ipv6():
        family, address = socket.AF_INET6, ("::", port)
    else:
        family, address = socket.AF_INET, ("", port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in _BOTH))
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound
