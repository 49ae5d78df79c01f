"""Content of the tree from host to host: each host offers its parts by TLS to hosts with the job's secret.

A peer sends the secret and ranges of parts, as a 4-byte length and text. The answer is each part with a 4-byte length, in
order. A missing part is sent after its arrival; a length of zero is a sign of life until then. Both ends check every part
by its hash.
"""

from __future__ import annotations

import threading
import time

from hvlaunch.agent.errands.sync.content import part_numbers, read_part
from hvlaunch.agent.wire.peers import PeerServer, dial, exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Callable, Iterator, Sequence, Tuple

__all__ = ["PartServer", "fetch"]

_SIGN = 5.0
"""Seconds between signs that a part is on its way."""
_COMING = 120.0
"""Seconds that one part may take. Slow links send parts in minutes; a peer that only pretends to send holds a host no longer."""
_LONGEST_RANGES = 1 << 22
_LONGEST_PART = 1 << 26


class PartServer:
    """Serves parts to other hosts until the process ends. `places` returns possible places of a part's content."""

    def __init__(
        self,
        secret: str,
        pem: str,
        folder: str,
        hashes: Sequence[str],
        part_size: int,
        places: Callable[[int], Iterator[Tuple[str, int]]],
    ) -> None:
        self._hashes = hashes
        self._part_size = part_size
        self._places = places
        self._changed = threading.Condition()
        self.port = PeerServer(secret, pem, folder, self._answer).port

    def has_more(self) -> None:
        """Wake waiting peers after the arrival of a part."""
        with self._changed:
            self._changed.notify_all()

    def _answer(self, peer: ssl.SSLSocket) -> None:
        size = int.from_bytes(exactly(peer, 4), "big")
        if size > _LONGEST_RANGES:
            return
        for number in part_numbers(exactly(peer, size).decode("ascii"), len(self._hashes)):
            data = self._part(number, peer)
            peer.sendall(len(data).to_bytes(4, "big") + data)

    def _part(self, number: int, peer: ssl.SSLSocket) -> bytes:
        """Return a part after its arrival; send signs of life until then. Raises EOFError after a long wait."""
        now = time.monotonic()
        deadline, sign = now + _COMING, now + _SIGN
        while True:
            for path, offset in self._places(number):
                data = read_part(path, offset, self._part_size, self._hashes[number])
                if data is not None:
                    return data
            now = time.monotonic()
            if now > deadline:
                raise EOFError
            if now > sign:
                sign = now + _SIGN
                peer.sendall(bytes(4))
            with self._changed:
                # A part may have come between the look and this wait.
                self._changed.wait(min(deadline - now, 0.05))


def fetch(
    addresses: Sequence[Tuple[str, int]],
    secret: str,
    fingerprint: str,
    ranges: str,
    take: Callable[[bytes], bool],
    wait: Callable[[], None],
) -> None:
    """Fetch parts from the first address with an answer. `take` gets the parts in order; False from `take` ends the call.

    `wait` is called now and then while a part is on its way to the peer. Returns early if the peer stops to send: the
    caller counts the parts.
    """
    peer = dial(addresses, secret, fingerprint)
    if peer is None:
        return
    try:
        with peer:
            words = ranges.encode("ascii")
            peer.sendall(len(words).to_bytes(4, "big") + words)
            while take(_next_part(peer, wait)):
                pass
    except (EOFError, OSError, ValueError):
        return


def _next_part(peer: ssl.SSLSocket, wait: Callable[[], None]) -> bytes:
    """Raises EOFError for a part that takes too long."""
    deadline = time.monotonic() + _COMING
    while True:
        size = int.from_bytes(exactly(peer, 4, deadline), "big")
        if size > _LONGEST_PART:
            raise EOFError
        if size:
            return exactly(peer, size, deadline)
        wait()
