"""Ending a collective that waits for a lost peer, by shutting down its connections.

Gloo can't end a running collective: its abort() returns at once and changes nothing. But when the kernel reports the end of a
connection, every operation on that connection fails at once, in any thread. Therefore this module notes the sockets that appear
while a round's groups are made, and shuts them down when the round breaks.
"""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvlaunch.rendezvous.client import keep_alive

__all__ = ["GroupSockets", "tcp_sockets"]

_TIMES = 20
"""Unanswered keepalive probes, one every 3 s: a peer that is silent for a minute is gone."""

_Identity = tuple[int, int]


class GroupSockets:
    """The TCP connections of this process to the other workers of a round.

    Groups that the script makes later, by `torch.distributed.new_group`, are recognised by their peers: a connection that is younger
    than the round and leads to an address that the round's own groups use. A connection to the rendezvous may be among them; its
    client then opens another.
    """

    def __init__(self) -> None:
        self._older: set[_Identity] = set()
        self._peers: set[str] | None = None
        """Addresses of peers; None while the groups are made, when any peer may be one of theirs."""
        self._held: dict[_Identity, socket.socket] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the sockets that appear inside the block, which makes the round's groups.

        Gloo waits for ever on a connection that was reset at the other end alone, while the other end waits for a third worker that waits
        for this one. Keepalive ends such a wait.
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
        """Shut down every connection of the round's groups and return their number. A repeated call takes later connections.

        Only reading is shut down. Gloo reads what has arrived, answers, and then fails all pending operations. If Gloo could not answer, it
        would forget threads that wait for the answer to be sent. Peers, too, must be able to answer what they still have to read, so
        the connections stay open until release(), although Gloo closes its side.
        """
        count = 0
        # Held sockets cost descriptors that the script needs too, so at most half of them are held.
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
        """Close the sockets that were shut down, after all living peers have left the round."""
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
    """Yield a new descriptor of each connected TCP socket of this process, with its peer. The caller closes the descriptor.

    A duplicate can't be closed by the socket's owner and given to another file while the caller looks at it.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (one name of it is gone again at once)
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        # From here on the duplicate is ours: each branch closes it or hands it to the caller.
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
