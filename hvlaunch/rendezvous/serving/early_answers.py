"""Answers before there is an event loop: agents ask only whether this is the right rendezvous of their job."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from hvlaunch.rendezvous.serving.listeners import PAUSE, is_shortage

__all__ = ["Answerer", "answer_early"]

_MOST_CALLERS = 512
"""Silent callers; with one more, the event loop takes over."""


class Answerer(Protocol):
    """Answers questions of `size` bytes beginning with `mark`, neither HTTP nor TLS."""

    mark: bytes
    size: int

    def answer(self, data: bytes, addresses: Iterable[str], port: int) -> bytes | None: ...


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
                    is_short = is_shortage(error)
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
    poll.poll(PAUSE * 1000)


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
