"""Which addresses really lead to whom: connect, and believe only the right nonce."""

from __future__ import annotations

import errno
import time

from hvlaunch.agent.quick import accept, socket
from hvlaunch.agent.selector import READ, WRITE, Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Optional, Sequence, Tuple

    Target = Tuple[str, int]

__all__ = ["Beacon", "http_request", "reach"]


class Beacon:
    """A listening socket that tells everyone who connects this host's nonce, and hangs up."""

    def __init__(self, listener: socket.socket, nonce: str) -> None:
        listener.setblocking(False)
        listener.listen(64)
        self.listener = listener
        self.port: int = listener.getsockname()[1]
        self._nonce = nonce.encode("ascii")

    def answer(self) -> None:
        """Serve one connection; nothing where it is gone again."""
        try:
            connection = accept(self.listener)
        except OSError:
            return
        try:
            connection.send(self._nonce)
        except OSError:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        self.listener.close()


def reach(
    targets: Sequence[Target],
    request: Callable[[Target], bytes],
    nonce: str,
    timeout: float,
    found: Callable[[int], bool],
    settle: Optional[float] = None,
    connect_timeout: Optional[float] = None,
) -> None:
    """Try all targets at once; call found(index) for each that answers with the nonce.

    Returns when `found` says that it is enough, when every target has answered or failed, `settle`
    seconds after the first good answer, after `connect_timeout` seconds where none has taken the
    connection, and after `timeout` seconds at the latest.
    """
    deadline = time.monotonic() + timeout
    no_hope = deadline if connect_timeout is None else time.monotonic() + connect_timeout
    selector = Selector()
    waiting = _connect_all(selector, targets)
    answers: Dict[int, bytes] = dict.fromkeys(waiting, b"")
    try:
        while waiting:
            left = min(deadline, no_hope) - time.monotonic()
            events = selector.select(max(left, 0.0))
            if left <= 0 and not events:  # who was in time counts, though we had no turn until now
                break
            for index, mask in events:
                connection = waiting[index]
                done = _advance(connection, mask, request(targets[index]), answers, index, selector)
                if not done:
                    no_hope = deadline
                if nonce.encode("ascii") in answers[index]:
                    done = True
                    if settle is not None:
                        deadline = min(deadline, time.monotonic() + settle)
                    if found(index):
                        return
                if done:
                    selector.unregister(connection)
                    waiting.pop(index).close()
    finally:
        for connection in waiting.values():
            connection.close()
        selector.close()


def _connect_all(selector: Selector, targets: Sequence[Target]) -> Dict[int, socket.socket]:
    """The connections that are under way, by index."""
    waiting = {}
    for index, (address, port) in enumerate(targets):
        try:
            # As bytes: text goes through the codec of international names, whose import takes 2 ms.
            family, kind, protocol, _, where = socket.getaddrinfo(
                address.encode("ascii"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
        except OSError:
            continue
        connection.setblocking(False)
        if connection.connect_ex(where) not in _UNDERWAY:
            connection.close()
            continue
        selector.register(connection, WRITE, index)
        waiting[index] = connection
    return waiting


_UNDERWAY = (0, errno.EINPROGRESS, errno.EAGAIN)


def _advance(
    connection: socket.socket,
    mask: int,
    request: bytes,
    answers: Dict[int, bytes],
    index: int,
    selector: Selector,
) -> bool:
    """Send the request, then collect the answer; True when nothing more will come."""
    try:
        if mask & WRITE:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return True
            connection.sendall(request)
            selector.modify(connection, READ, index)
            return False
        data = connection.recv(4096)
    except OSError:
        return True
    answers[index] += data
    return not data or len(answers[index]) > 1 << 16


def http_request(token: str) -> Callable[[Target], bytes]:
    """The request for the rendezvous' nonce, with a token that is good for nothing else."""

    def request(target: Target) -> bytes:
        host = "[%s]:%d" % target if ":" in target[0] else "%s:%d" % target
        lines = [
            "GET /-/nonce HTTP/1.1",
            "Host: " + host,
            "Authorization: Bearer " + token,
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    return request
