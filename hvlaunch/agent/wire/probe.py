"""Find the addresses of a host: connect to each, and require a proof."""

from __future__ import annotations

import errno
import time

from hvlaunch.agent.quick import READ, WRITE, Selector, accept, socket
from hvlaunch.agent.wire.proof import ANSWER_SIZE, QUESTION_SIZE, Prover, Question, canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Optional, Sequence, Tuple

    Target = Tuple[str, int]

__all__ = ["Beacon", "reach"]

_MOST_CALLERS = 512
"""Hundreds of hosts call rank 0's host at once, from several addresses each; a process may usually have 1,024 files open."""


class Beacon:
    """A listening socket at which programs with this host's key get a proof of this host.

    `known_as` is an address of this host for others, behind NAT. `keep` takes each connection with a proof; without
    `keep` it is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: Selector,
        prover: Prover,
        known_as: Optional[str],
        keep: Callable[[socket.socket], None] = socket.socket.close,
    ) -> None:
        # The agent has one thread, and a caller may be gone by the time of accept().
        listener.setblocking(False)
        # Beyond the queue the kernel drops callers, who try again only after a second.
        listener.listen(4096)
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._selector = selector
        self._prover = prover
        self._known_as = [] if known_as is None else [known_as]
        self._keep = keep
        self._callers: Dict[socket.socket, bytes] = {}
        selector.register(listener, READ, self._accept)

    def _accept(self) -> None:
        """Accept a caller; close the oldest of too many."""
        try:
            caller = accept(self._listener)
        except OSError:
            return
        # A stranger that holds its connections open must not lock other hosts out.
        if len(self._callers) >= _MOST_CALLERS:
            self._drop(next(iter(self._callers)))
        caller.setblocking(False)
        self._callers[caller] = b""
        self._selector.register(caller, READ, lambda: self._hear(caller))

    def _hear(self, caller: socket.socket) -> None:
        if caller not in self._callers:
            return  # closed in the same turn, to make room for another caller
        try:
            data = caller.recv(QUESTION_SIZE - len(self._callers[caller]))
            self._callers[caller] += data
            if data and len(self._callers[caller]) < QUESTION_SIZE:
                return
            addresses = [caller.getsockname()[0], *self._known_as]
            answer = self._prover.answer(self._callers[caller], addresses, self.port)
            if answer is not None:
                caller.send(answer)
                self._drop(caller, self._keep)
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._drop(caller)

    def _drop(
        self, caller: socket.socket, end: Callable[[socket.socket], None] = socket.socket.close
    ) -> None:
        self._selector.unregister(caller)
        del self._callers[caller]
        end(caller)

    def close(self) -> None:
        """Close the socket and all connections. May be repeated."""
        if self._listener.fileno() < 0:
            return
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.unregister(self._listener)
        self._listener.close()


def reach(
    targets: Sequence[Target],
    key: str,
    name: str,
    timeout: float,
    on_proof: Callable[[int], bool],
    settle: Optional[float] = None,
    connect_timeout: Optional[float] = None,
) -> None:
    """Try the targets at once; call on_proof(index) for each proof of `name` by the key.

    Returns after `on_proof` returns True, after each target has answered or failed, `settle` seconds after the first
    proof, after `connect_timeout` seconds without any connection, and after `timeout` seconds at the latest.
    """
    deadline = time.monotonic() + timeout
    no_hope = deadline if connect_timeout is None else time.monotonic() + connect_timeout
    selector = Selector()
    waiting = _connect_all(selector, targets)
    questions = {index: Question(key, name, *targets[index]) for index in waiting}
    answers: Dict[int, bytes] = dict.fromkeys(waiting, b"")
    try:
        while waiting:
            left = min(deadline, no_hope) - time.monotonic()
            events = selector.select(max(left, 0.0))
            # On a busy host answers may have come in time, and this thread had no turn until now: they count.
            if left <= 0 and not events:
                break
            for index, mask in events:
                connection = waiting[index]
                done = _advance(connection, mask, questions[index].data, answers, index, selector)
                if not done:
                    no_hope = deadline
                elif questions[index].is_answer(answers[index]):
                    if settle is not None:
                        deadline = min(deadline, time.monotonic() + settle)
                    if on_proof(index):
                        return
                if done:
                    selector.unregister(connection)
                    waiting.pop(index).close()
    finally:
        for connection in waiting.values():
            connection.close()
        selector.close()


def _connect_all(selector: Selector, targets: Sequence[Target]) -> Dict[int, socket.socket]:
    """Return the connections under way, by index."""
    waiting = {}
    for index, (address, port) in enumerate(targets):
        try:
            canonical(address)
            # As bytes: text would pass the codec for international names, whose import takes 2 ms.
            family, kind, protocol, _, endpoint = socket.getaddrinfo(
                address.encode("ascii"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
        except (OSError, ValueError):  # not an address
            continue
        # Without blocking, the addresses are tried at the same time: a dead one may take minutes.
        connection.setblocking(False)
        if connection.connect_ex(endpoint) not in _UNDERWAY:
            connection.close()
            continue
        selector.register(connection, WRITE, index)
        waiting[index] = connection
    return waiting


_UNDERWAY = (0, errno.EINPROGRESS, errno.EAGAIN)


def _advance(
    connection: socket.socket,
    mask: int,
    question: bytes,
    answers: Dict[int, bytes],
    index: int,
    selector: Selector,
) -> bool:
    """Send the question, then collect the answer; return True once the connection is finished."""
    try:
        if mask & WRITE:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return True
            connection.sendall(question)
            selector.modify(connection, READ, index)
            return False
        data = connection.recv(ANSWER_SIZE - len(answers[index]))
    except OSError:
        return True
    answers[index] += data
    return not data or len(answers[index]) == ANSWER_SIZE
