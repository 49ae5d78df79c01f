"""Takes the connections that come to a listening socket, a few at each turn of the event loop."""

import asyncio
import socket
from collections.abc import Callable

from hvlaunch.rendezvous.serving.descriptors import REST, is_shortage

__all__ = ["Acceptor"]

_AT_ONCE = 64  # connections, then others have their turn: who is inside waits for no crowd at the door


class Acceptor:
    """For the thread of the running event loop alone. close() does not close the socket."""

    def __init__(
        self,
        listener: socket.socket,
        new_client: Callable[[], asyncio.Protocol],
        is_welcome: Callable[[socket.socket, object], bool],
        when_short: Callable[[], bool],
    ) -> None:
        """is_welcome(socket, name) tells whether a client gets a protocol at all; `name` is the socket's at its other end.

        Where there is no file descriptor for one, when_short() tells whether it has found one, and is asked again if not.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._new_client = new_client
        self._is_welcome = is_welcome
        self._when_short = when_short
        self._arriving: set[asyncio.Task[None]] = set()
        self._rest: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more."""
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)

    def _open(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, name = self._listener.accept()
            except OSError as error:
                if is_shortage(error):
                    self._loop.remove_reader(self._listener)
                    self._rest = self._loop.call_later(0.0 if self._when_short() else REST, self._open)
                return  # else nobody is there, or gone again
            if not self._is_welcome(sock, name):
                sock.close()
                continue
            task = self._loop.create_task(self._admit(sock))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _admit(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new_client, sock)
        except OSError:  # it is gone again
            sock.close()
