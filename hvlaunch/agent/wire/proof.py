"""Mutual HMAC proof between a prober and a beacon, bound to the probed address.

A question is a fresh challenge with a proof, so only programs with the key get an answer. Both proofs name the address
and port of the question. A foreign machine with the same address can't pass questions on to the right host: they would
arrive by another address there, and get no answer. Keys never travel.
"""

from __future__ import annotations

import os

from hvlaunch.agent.quick import mac, same, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Optional, Set

__all__ = ["ANSWER_SIZE", "MARK", "QUESTION_SIZE", "Prover", "Question", "canonical"]

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
