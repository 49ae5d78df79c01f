"""Unix sockets by which programs of this user come to a server for something else than its store."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvlaunch.rendezvous.serving.peer import is_own_user
from hvlaunch.rendezvous.serving.traffic import Traffic, TrafficLimits

if TYPE_CHECKING:
    from hvlaunch.rendezvous.serving.acceptor import Acceptor
    from hvlaunch.rendezvous.serving.connection import ClientConnection
    from hvlaunch.rendezvous.serving.http import Answer, Head, Route

    Admit = Callable[[Head], Answer | Route]

__all__ = ["SideDoors"]

_LIMITS = TrafficLimits(connections=256, bodies=1 << 20)


class SideDoors:
    """The listening sockets and their connections, which have limits of their own. Only programs of this user get in."""

    def __init__(self) -> None:
        self._doors: dict[socket.socket, Admit] = {}
        self._traffic: Traffic[ClientConnection] = Traffic(_LIMITS)

    @property
    def sockets(self) -> list[socket.socket]:
        return list(self._doors)

    @property
    def connections(self) -> list[ClientConnection]:
        """Those that are open."""
        return [*self._traffic.open]

    def add(self, listener: socket.socket, admit: Admit) -> None:
        """Open it later, by open(). `admit` is asked at each request, as RequestReader says."""
        self._doors[listener] = admit

    def open(self, listener: socket.socket, when_short: Callable[[], bool]) -> Acceptor:
        """Let callers in, in the running event loop; when_short() is as an Acceptor says."""
        from hvlaunch.rendezvous.serving.acceptor import Acceptor  # noqa: PLC0415 (it needs asyncio, as few jobs do)
        from hvlaunch.rendezvous.serving.connection import ClientConnection  # noqa: PLC0415 (as above)
        from hvlaunch.rendezvous.serving.http import HttpLimits  # noqa: PLC0415 (as above)

        admit, limits = self._doors[listener], HttpLimits(body=_LIMITS.bodies)
        return Acceptor(
            listener,
            lambda: ClientConnection(admit, limits, self._traffic),
            lambda caller, _name: is_own_user(caller),
            when_short,
        )

    def close(self) -> None:
        """Listen no more."""
        for listener in self._doors:
            listener.close()
