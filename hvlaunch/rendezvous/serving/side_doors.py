"""Unix sockets by which programs of this user come to a server for something else than its store."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from hvlaunch.rendezvous.serving.peer import is_own_user
from hvlaunch.rendezvous.serving.traffic import Traffic, TrafficLimits, plain_address

if TYPE_CHECKING:
    import ssl

    from hvlaunch.rendezvous.serving.acceptor import Acceptor
    from hvlaunch.rendezvous.serving.connection import ClientConnection
    from hvlaunch.rendezvous.serving.http import Answer, Head, Route

    Admit = Callable[[Head], Answer | Route]

__all__ = ["Door", "SideDoors"]

_LIMITS = TrafficLimits(connections=256, bodies=1 << 20)
_BROWSER_LIMITS = TrafficLimits(connections=128, bodies=1 << 20)
_BROWSER_FIELDS = frozenset((b"cookie", b"host", b"origin", b"sec-fetch-site"))


class Door(NamedTuple):
    """Who comes by a socket is asked for by `admit` at each request, as RequestReader says; `context` makes TLS, if any."""

    admit: Admit
    context: Callable[[], ssl.SSLContext] | None = None


class SideDoors:
    """The listening sockets, and who has come by them. They have limits of their own: nobody is kept out for a stranger.

    By a Unix socket programs of this user come, and nobody else gets in; by any other anybody, with a browser.
    """

    def __init__(self) -> None:
        self._doors: dict[socket.socket, Door] = {}
        self._traffic: Traffic[ClientConnection] = Traffic(_LIMITS)
        self._browsers: Traffic[ClientConnection] = Traffic(_BROWSER_LIMITS)

    @property
    def sockets(self) -> list[socket.socket]:
        return list(self._doors)

    @property
    def connections(self) -> list[ClientConnection]:
        """Those that are open."""
        return [*self._traffic.open, *self._browsers.open]

    def add(self, listener: socket.socket, door: Door) -> None:
        """Open it later, by open()."""
        self._doors[listener] = door

    def open(self, listener: socket.socket, when_short: Callable[[], bool]) -> Acceptor:
        """Let callers in, in the running event loop; when_short() is as an Acceptor says."""
        from hvlaunch.rendezvous.serving.acceptor import Acceptor  # noqa: PLC0415 (it needs asyncio, as few jobs do)
        from hvlaunch.rendezvous.serving.connection import ClientConnection  # noqa: PLC0415 (as above)
        from hvlaunch.rendezvous.serving.http import HttpLimits  # noqa: PLC0415 (as above)

        door, limits = self._doors[listener], HttpLimits(body=_LIMITS.bodies)
        if listener.family == socket.AF_UNIX:
            return Acceptor(
                listener,
                lambda: ClientConnection(door.admit, limits, self._traffic),
                lambda caller, _name: is_own_user(caller),
                when_short,
            )
        from hvlaunch.rendezvous.serving.wire import Wire  # noqa: PLC0415 (few jobs are looked at with a browser)

        def connect(is_private: Callable[[], bool]) -> ClientConnection:
            def admit(head: Head) -> Answer | Route:
                return door.admit(head._replace(is_private=is_private()))

            return ClientConnection(admit, limits, self._browsers, fields=_BROWSER_FIELDS)

        return Acceptor(
            listener,
            lambda: Wire(connect, door.context, None),
            lambda _caller, name: self._browsers.is_welcome(plain_address(name)),
            when_short,
        )

    def close(self) -> None:
        """Listen no more."""
        for listener in self._doors:
            listener.close()
