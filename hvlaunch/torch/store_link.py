"""Whether a store is still there, without asking it: where a TCPStore has gone, torch writes a C++ stack to stderr."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import distributed as dist

from hvlaunch.torch.elastic.sockets import tcp_sockets

__all__ = ["link_to"]

_MAPPED = "::ffff:"
"""An IPv4 address as one of IPv6."""


@contextmanager
def link_to(store: dist.Store) -> Iterator[Callable[[], bool]]:
    """What tells whether the other end of the connection to the store is open; always true where there is none to be seen."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    connection = _connection(store.host, store.port) if isinstance(store, dist.TCPStore) else None
    if connection is None:
        yield lambda: True
        return
    with connection:
        yield lambda: _is_open(connection)


def _connection(host: str, port: int) -> socket.socket | None:
    """That of this process to there, by a descriptor of its own."""
    try:
        addresses = {str(about[4][0]) for about in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    found = None
    for descriptor, peer in tcp_sockets():
        one = socket.socket(fileno=descriptor)
        if found is None and peer[0].removeprefix(_MAPPED) in addresses and peer[1] == port:
            found = one
        else:
            one.close()
    return found


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
