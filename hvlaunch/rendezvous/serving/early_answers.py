"""Callers while there is no event loop: agents that only ask whether this is their job's rendezvous."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from hvlaunch.rendezvous.serving.listeners import PAUSE, is_shortage

__all__ = ["Answerer", "answer_early"]

_MOST_CALLERS = 128
"""That say nothing; with one more, the event loop takes over, which knows how to bound them."""


class Answerer(Protocol):
    """Answers questions of `size` bytes that are neither HTTP nor TLS, and begin with `mark`."""

    mark: bytes
    size: int

    def answer(self, data: bytes, addresses: Iterable[str], port: int) -> bytes | None: ...


def answer_early(
    listeners: Callable[[], Iterable[socket.socket]],
    control_sockets: Callable[[], Iterable[socket.socket]],
    bell: int,
    is_over: Callable[[], bool],
    answerer: Answerer | None,
    when_short: Callable[[], bool],
) -> list[socket.socket]:
    """Answer questions until somebody comes with anything else, or is_over() is true after the bell was rung.

    Returns the callers that are still there, none of whose bytes has been taken; also when somebody is at one of the
    `control_sockets`, where nobody is let in here. There may be more `listeners` and `control_sockets` after the bell, too.
    Where there is no file descriptor for a caller, when_short() tells whether it has found one, and is asked again if not.
    """
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    doors: dict[int, socket.socket] = {}
    callers: dict[int, socket.socket] = {}
    while True:
        for door in listeners():
            if door.fileno() not in doors:
                doors[door.fileno()] = door
                door.setblocking(False)
                poll.register(door, select.POLLIN)
        beside = {door.fileno() for door in control_sockets()}
        for fd in beside:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            if fd == bell:
                os.read(bell, 512)
                if is_over():
                    return list(callers.values())
            elif fd in beside:
                return list(callers.values())
            elif fd in doors:
                try:
                    caller, _ = doors[fd].accept()
                    callers[caller.fileno()] = caller
                    poll.register(caller, select.POLLIN)
                    is_short = False
                except OSError as error:
                    is_short = is_shortage(error)
                if callers and (answerer is None or is_short or len(callers) > _MOST_CALLERS):
                    return list(callers.values())
                if is_short and not when_short():
                    _rest(bell)
            elif answerer is None or not _serve(callers[fd], answerer):
                return list(callers.values())
            else:
                poll.unregister(fd)
                callers.pop(fd).close()


def _rest(bell: int) -> None:
    """Wait, but no longer than until the bell is rung."""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.poll(PAUSE * 1000)


def _serve(caller: socket.socket, answerer: Answerer) -> bool:
    """Whether it is done with: it has asked its question, or is gone."""
    try:
        data = caller.recv(answerer.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if data and (len(data) < answerer.size or not data.startswith(answerer.mark)):
            return False
        local = caller.getsockname()
        answer = answerer.answer(data, [local[0]], local[1]) if data else None
        if answer is not None:
            caller.recv(answerer.size)  # unread, it would make the end of the connection a reset
            caller.send(answer)
    except OSError:
        pass
    return True
