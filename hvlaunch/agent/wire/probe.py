"""Find the addresses of a host: connect to each, and require a proof.

The proof is mutual, between prober and beacon, by HMAC, and bound to the probed address. A question is a fresh challenge with a proof, so only programs with the key get an answer. Both proofs name the address
and port of the question. A foreign machine with the same address can't pass questions on to the right host: they would
arrive by another address there, and get no answer. Keys never travel.
"""

from __future__ import annotations

import errno
import os
import time

from hvlaunch.agent.quick import READ, WRITE, Selector, accept, mac, same, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Iterable, Optional, Sequence, Set, Tuple

    Target = Tuple[str, int]

__all__ = ["ANSWER_SIZE", "MARK", "QUESTION_SIZE", "Beacon", "Prover", "Question", "canonical", "reach"]

MARK = b"\x01hvl"
"""The first bytes of a question; neither HTTP nor TLS begins like this."""
_CHALLENGE = ANSWER_SIZE = 32
QUESTION_SIZE = len(MARK) + _CHALLENGE + ANSWER_SIZE
_MOST_CHALLENGES = 100000


class Question:
    """A question to an address and port: is `name` there? Send `data`."""

    def __init__(self, key: str, name: str, address: str, port: int) -> None:
        self._parts = (key, name, canonical(address), port)
        self._challenge = os.urandom(_CHALLENGE)
        self.data = MARK + self._challenge + _proof("question", *self._parts, self._challenge)

    def is_answer(self, data: bytes) -> bool:
        return same(data, _proof("answer", *self._parts, self._challenge))


class Prover:
    """Answers questions for `name` from programs with the key, each question once."""

    mark, size = MARK, QUESTION_SIZE

    def __init__(self, key: str, name: str) -> None:
        self._key = key
        self._name = name
        self._answered: Set[bytes] = set()

    def answer(self, data: bytes, addresses: Iterable[str], port: int) -> Optional[bytes]:
        """Return the answer to a question that came to this port by any of these addresses; None for a wrong question."""
        if len(data) != QUESTION_SIZE or not data.startswith(MARK):
            return None
        challenge = data[len(MARK) : -ANSWER_SIZE]
        for address in addresses:
            parts = (self._key, self._name, canonical(address), port)
            if same(data[-ANSWER_SIZE:], _proof("question", *parts, challenge)):
                # A repeated challenge is a replay by a program without the key.
                if challenge in self._answered or len(self._answered) >= _MOST_CHALLENGES:
                    return None
                self._answered.add(challenge)
                return _proof("answer", *parts, challenge)
        return None


def _proof(kind: str, key: str, name: str, address: str, port: int, challenge: bytes) -> bytes:
    # Null bytes separate the parts, so that no two lists of parts make the same message.
    message = "\0".join((kind, name, address, str(port), ""))
    return mac(_bytes(key), _bytes(message) + challenge)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def canonical(address: str) -> str:
    """Return the canonical text of an address, without its zone; IPv4 even for a mapped IPv6 address."""
    address = address.partition("%")[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    written = socket.inet_ntop(family, socket.inet_pton(family, address))
    return written[7:] if written.startswith("::ffff:") and "." in written else written


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
