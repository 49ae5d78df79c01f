"""Ending a collective that waits for a peer that will never answer: by shutting down what it waits on.

Gloo has no way to end a collective that is running: its abort() returns at once and changes nothing. But
when the kernel says that a connection is over, every operation on it fails at once, in whatever thread it
waits. So we note which sockets came while a round's groups were made, and shut those down when it is broken.
"""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvlaunch.rendezvous.requests import keep_alive

__all__ = ["GroupSockets", "tcp_sockets"]

_TIMES = 20
"""A peer that does not answer for a minute is gone."""

_Identity = tuple[int, int]


class GroupSockets:
    """The TCP connections of this process to the other workers of a round.

    Groups that the script makes later, by `torch.distributed.new_group`, are found by their peers: a
    connection that is younger than the round and leads to an address that the round's own groups use. A
    connection to the rendezvous may be among them; who uses it makes a new one.
    """

    def __init__(self) -> None:
        self._older: set[_Identity] = set()
        self._peers: set[str] | None = None
        """None while the groups are made: any peer may be one of theirs."""
        self._held: dict[_Identity, socket.socket] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what comes inside the block, which makes the round's groups.

        Gloo waits for ever on a connection that was reset at the other end alone, while that end waits for somebody else, who
        waits for us. So these are kept alive.
        """
        self._older = {identity for identity, _ in _connections()}
        yield
        self._peers = set()
        for fd, (host, _) in tcp_sockets():
            with socket.socket(fileno=fd) as sock:
                if _identity(fd) not in self._older:
                    self._peers.add(host)
                    keep_alive(sock, times=_TIMES)

    def shut_down(self) -> int:
        """End every connection of the round's groups, from any thread; how many there were. Again: what has come since.

        They end for reading only. Gloo reads what there still is, answers it, and then fails everything that waits;
        if it could not answer, it would forget who waits for the answer to be sent. So that the peers, too, can
        answer what they still have to read, the connections stay until release(), though Gloo closes its side.
        """
        count = 0
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for fd, peer in tcp_sockets():
            identity = _identity(fd)
            sock = socket.socket(fileno=fd)
            if identity in self._held or not self._is_ours(identity, peer):
                sock.close()
                continue
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
                count += 1
            if fd < room:
                self._held[identity] = sock
            else:
                sock.close()
        return count

    def release(self) -> None:
        """Close what was shut down: all peers that still live have left the round."""
        while self._held:
            self._held.popitem()[1].close()

    def _is_ours(self, identity: _Identity, peer: tuple[str, int]) -> bool:
        return identity not in self._older and (self._peers is None or peer[0] in self._peers)


def _connections() -> Iterator[tuple[_Identity, tuple[str, int]]]:
    for fd, peer in tcp_sockets():
        identity = _identity(fd)
        os.close(fd)
        yield identity, peer


def _identity(fd: int) -> _Identity:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def tcp_sockets() -> Iterator[tuple[int, tuple[str, int]]]:
    """A new descriptor of each connected TCP socket of this process, to be closed by who takes it; and its peer.

    A descriptor of our own can't be closed by its owner, and given to something else, while we look at it.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (one name of it is gone again at once)
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        peer = _peer(fd)
        if peer is None:
            os.close(fd)
        else:
            yield fd, peer


def _peer(fd: int) -> tuple[str, int] | None:
    if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith("socket:"):
        return None
    taken = socket.socket(fileno=fd)
    try:
        if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
            return None
        host, port, *_ = taken.getpeername()
    except OSError:
        return None
    finally:
        taken.detach()
    return host, port
