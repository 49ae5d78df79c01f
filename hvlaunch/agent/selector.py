"""Waiting for file descriptors; hosts are Linux."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Protocol, Tuple, Union

    class HasFileno(Protocol):
        def fileno(self) -> int: ...


__all__ = ["READ", "WRITE", "Selector"]

READ, WRITE = 0x1, 0x4
"""EPOLLIN and EPOLLOUT, see epoll_ctl(2); by number, since a driver may import this where there is no epoll."""


class Selector:
    """Waits for file descriptors, and for whatever has one, as selectors.EpollSelector does.

    Which would import enum, math and more, for 2 ms on every host.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._waiting: Dict[int, Tuple[Any, int]] = {}

    def register(self, file: Union[int, HasFileno], events: int, data: Any) -> None:
        """Wait for `events` (READ, WRITE or both), of which select() tells with `data`."""
        fd = _fd(file)
        self._epoll.register(fd, events)
        self._waiting[fd] = data, events

    def modify(self, file: Union[int, HasFileno], events: int, data: Any) -> None:
        fd = _fd(file)
        self._epoll.modify(fd, events)
        self._waiting[fd] = data, events

    def unregister(self, file: Union[int, HasFileno]) -> None:
        fd = _fd(file)
        del self._waiting[fd]
        self._epoll.unregister(fd)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def select(self, timeout: Optional[float]) -> List[Tuple[Any, int]]:
        """Wait at most `timeout` seconds (None: for ever): the data and the events of each that is ready.

        An error, or the other side's end, is as if all that was waited for had come.
        """
        found = []
        for fd, ready in self._epoll.poll(-1 if timeout is None else timeout, max(1, len(self._waiting))):
            data, events = self._waiting[fd]
            found.append((data, events & ready or events))
        return found

    def close(self) -> None:
        self._epoll.close()


def _fd(file: Union[int, HasFileno]) -> int:
    return file if isinstance(file, int) else file.fileno()
