"""Accepts connections of a server: TCP for clients, a Unix socket for the job's control.

Before there is an event loop, agents get answers: they ask only whether this is the right rendezvous of their job.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hvlaunch.owners import peer_is_own
from hvlaunch.rendezvous.serving.traffic import Answerer, HttpLimits, Traffic, TrafficLimits

if TYPE_CHECKING:
    import asyncio

    from hvlaunch.rendezvous.serving.http import Answer, ClientConnection, Head, Route

    Admit = Callable[[Head], Answer | Route]

__all__ = [
    "RESERVED",
    "Acceptor",
    "ControlSockets",
    "Shortage",
    "answer_early",
]


_PAUSE = 0.1
"""Seconds until the server looks again for a free file descriptor."""
RESERVED = 8
"""Descriptors held back, for the start of the event loop when clients have exhausted the limit."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_AT_ONCE = 64
"""Connections accepted in a turn of the event loop: a crowd of new clients must not delay the connected ones."""
_CONTROL_LIMITS = TrafficLimits(connections=256, bodies=1 << 20)


def _is_shortage(error: OSError) -> bool:
    """True if the error comes from a temporary lack of descriptors or memory."""
    return error.errno in _SHORTAGES


class Shortage:
    """The reaction to a lack of file descriptors: raise this process's limit, then warn the user once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._has_warned = False

    def relieve(self) -> bool:
        """Raise the limit; False at its maximum."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            raised = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
            # Doubled, and not set to the maximum: each later child inherits the limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            return True
        if not self._has_warned:
            self._has_warned = True
            self._say(
                f"no file descriptor is left in hvlaunch (the limit is {hard}): clients of the rendezvous wait; "
                "try: a higher limit (ulimit -n)"
            )
        return False


class Acceptor:
    """Accepts the connections of a listening socket, a few at each turn of the event loop.

    Belongs to the thread of the running loop. close() does not close the socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        new_client: Callable[[], asyncio.Protocol],
        is_welcome: Callable[[socket.socket, object], bool],
        when_short: Callable[[], bool],
    ) -> None:
        """is_welcome(socket, name) decides about a new client; `name` is its address.

        Without a free file descriptor, when_short() tries to free some; it is called again later if it returns False.
        """
        import asyncio  # noqa: PLC0415 (a job without clients does not load it)

        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._new_client = new_client
        self._is_welcome = is_welcome
        self._when_short = when_short
        self._arriving: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        # A client may be gone between the loop's notice and accept(), which would block the server
        # then.
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, name = self._listener.accept()
            except OSError as error:
                if _is_shortage(error):
                    # The socket stays readable: watching it without a pause would take a whole processor.
                    self._loop.remove_reader(self._listener)
                    self._pause = self._loop.call_later(0.0 if self._when_short() else _PAUSE, self._open)
                # No client waits any more, or the client has gone again.
                return
            if not self._is_welcome(sock, name):
                sock.close()
                continue
            task = self._loop.create_task(self._admit(sock))
            # The loop holds tasks weakly.
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _admit(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new_client, sock)
        # The client has gone again.
        except OSError:
            sock.close()


class ControlSockets:
    """Unix sockets for this user's programs to control the job, and their connections.

    Their limits are separate: clients of the store can't keep them out.
    """

    def __init__(self) -> None:
        self._admit: dict[socket.socket, Admit] = {}
        self._traffic: Traffic[ClientConnection] = Traffic(_CONTROL_LIMITS)

    @property
    def sockets(self) -> list[socket.socket]:
        return list(self._admit)

    @property
    def connections(self) -> list[ClientConnection]:
        """The open connections."""
        return list(self._traffic.open)

    def add(self, listener: socket.socket, admit: Admit) -> None:
        """Take a socket for open(); `admit` decides on each request, see RequestReader."""
        self._admit[listener] = admit

    def open(self, listener: socket.socket, when_short: Callable[[], bool]) -> Acceptor:
        """Accept connections in the running event loop; when_short() is as an Acceptor says."""
        from hvlaunch.rendezvous.serving.http import ClientConnection  # noqa: PLC0415 (asyncio)

        admit, limits = self._admit[listener], HttpLimits(body=_CONTROL_LIMITS.bodies)
        return Acceptor(
            listener,
            lambda: ClientConnection(admit, limits, self._traffic),
            lambda client, _name: peer_is_own(client),
            when_short,
        )

    def close(self) -> None:
        """Listen no more."""
        for listener in self._admit:
            listener.close()


_MOST_CALLERS = 512
"""Silent callers; with one more, the event loop takes over."""


def answer_early(
    listeners: Callable[[], Iterable[socket.socket]],
    control_sockets: Callable[[], Iterable[socket.socket]],
    wakeup: int,
    is_over: Callable[[], bool],
    answerer: Answerer | None,
    when_short: Callable[[], bool],
) -> list[socket.socket]:
    """Answer questions until a caller sends anything else, or is_over() is true after a wake-up.

    Returns the callers still connected, with all their bytes unread; also when a program connects to one of the
    `control_sockets`, which are not served here. A wake-up may also announce more `listeners` and `control_sockets`.
    Without a file descriptor for a caller, when_short() tries to free one; it is called again if it fails.
    """
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    sockets: dict[int, socket.socket] = {}
    callers: dict[int, socket.socket] = {}
    while True:
        for listener in listeners():
            if listener.fileno() not in sockets:
                sockets[listener.fileno()] = listener
                # A caller may be gone between poll() and accept(), which would block the thread then.
                listener.setblocking(False)
                poll.register(listener, select.POLLIN)
        beside = {control.fileno() for control in control_sockets()}
        for fd in beside:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            if fd == wakeup:
                os.read(wakeup, 512)
                if is_over():
                    return list(callers.values())
            elif fd in beside:
                return list(callers.values())
            elif fd in sockets:
                try:
                    caller, _ = sockets[fd].accept()
                    callers[caller.fileno()] = caller
                    poll.register(caller, select.POLLIN)
                    is_short = False
                # The caller has gone again, or no descriptor is left for it.
                except OSError as error:
                    is_short = _is_shortage(error)
                # The event loop takes over: it has limits for a crowd, and can drop silent callers.
                if callers and (answerer is None or is_short or len(callers) > _MOST_CALLERS):
                    return list(callers.values())
                if is_short and not when_short():
                    _pause(wakeup)
            elif answerer is None or not _serve(callers[fd], answerer):
                return list(callers.values())
            else:
                # Before close(): poll() would report a closed descriptor at once, again and again.
                poll.unregister(fd)
                callers.pop(fd).close()


def _pause(wakeup: int) -> None:
    """Pause, but no longer than until a wake-up."""
    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.poll(_PAUSE * 1000)


def _serve(caller: socket.socket, answerer: Answerer) -> bool:
    """True if the caller is finished: its question is answered, or its connection is gone."""
    try:
        # The bytes stay in the socket: they are the event loop's if they are no question.
        data = caller.recv(answerer.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if data and (len(data) < answerer.size or not data.startswith(answerer.mark)):
            return False
        local = caller.getsockname()
        answer = answerer.answer(data, [local[0]], local[1]) if data else None
        if answer is not None:
            # Bytes left unread would turn the end of the connection into a reset.
            caller.recv(answerer.size)
            caller.send(answer)
    except OSError:
        pass
    return True
