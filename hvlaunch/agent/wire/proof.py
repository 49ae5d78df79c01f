"""Who is asked proves that it has a key, by the address at which it was asked; and so does who asks.

A question is a fresh challenge with a proof of its own, so that only those who have the key are answered. Both proofs
name the address and the port that the question went to: what a stranger's machine with the same address passes on to the
right one comes in there by another address, and is not answered. Keys, and what they protect, never travel here.
"""

from __future__ import annotations

import os

from hvlaunch.agent.quick import mac, same, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Optional, Set

__all__ = ["ANSWER_SIZE", "MARK", "QUESTION_SIZE", "Prover", "Question", "canonical"]

MARK = b"\x01hvl"
"""What a question begins with: neither HTTP nor TLS does."""
_CHALLENGE = ANSWER_SIZE = 32
QUESTION_SIZE = len(MARK) + _CHALLENGE + ANSWER_SIZE
_MOST_CHALLENGES = 100000


class Question:
    """Asks whether `name` is at the address and port; `data` is to be sent there."""

    def __init__(self, key: str, name: str, address: str, port: int) -> None:
        self._parts = (key, name, canonical(address), port)
        self._challenge = os.urandom(_CHALLENGE)
        self.data = MARK + self._challenge + _proof("question", *self._parts, self._challenge)

    def is_answer(self, data: bytes) -> bool:
        return same(data, _proof("answer", *self._parts, self._challenge))


class Prover:
    """Answers for `name` those who have the key, each question once."""

    mark, size = MARK, QUESTION_SIZE

    def __init__(self, key: str, name: str) -> None:
        self._key = key
        self._name = name
        self._answered: Set[bytes] = set()

    def answer(self, data: bytes, addresses: Iterable[str], port: int) -> Optional[bytes]:
        """The answer to a question that came to this port by one of our addresses; None: there is none."""
        if len(data) != QUESTION_SIZE or not data.startswith(MARK):
            return None
        challenge = data[len(MARK) : -ANSWER_SIZE]
        for address in addresses:
            parts = (self._key, self._name, canonical(address), port)
            if same(data[-ANSWER_SIZE:], _proof("question", *parts, challenge)):
                if challenge in self._answered or len(self._answered) >= _MOST_CHALLENGES:
                    return None
                self._answered.add(challenge)
                return _proof("answer", *parts, challenge)
        return None


def _proof(kind: str, key: str, name: str, address: str, port: int, challenge: bytes) -> bytes:
    said = "\0".join((kind, name, address, str(port), ""))
    return mac(_bytes(key), _bytes(said) + challenge)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def canonical(address: str) -> str:
    """The one way to write an address, without its zone; an IPv4 one in its own form also where IPv6 shows it."""
    address = address.partition("%")[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    written = socket.inet_ntop(family, socket.inet_pton(family, address))
    return written[7:] if written.startswith("::ffff:") and "." in written else written
