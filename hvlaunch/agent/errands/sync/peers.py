"""Content of the tree from host to host: each host offers its parts by TLS to hosts with the job's secret.

A peer sends the secret and ranges of parts, as a 4-byte length and text. The answer is each part in order: pieces with a
4-byte length each, and `_END`. A part on its way to this host is passed on while it comes, so a chain of hosts takes hardly longer
than one host. If such a part turns out to be damaged, `_AGAIN` takes its pieces back. A length of zero is a sign of life while
nothing comes. Both ends check every part by its hash.
"""

from __future__ import annotations

import threading
import time

from hvlaunch.agent.errands.sync.content import PIECE, part_numbers, read_part
from hvlaunch.agent.wire.peers import PeerServer, dial, exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from typing import Callable, Iterator, Optional, Sequence, Tuple, Union

__all__ = ["PartServer", "fetch"]

_SIGN = 5.0
"""Seconds between signs that a part is on its way."""
_COMING = 120.0
"""Seconds that one part may take. Slow links send parts in minutes; a peer that only pretends to send holds a host no longer."""
_LONGEST_RANGES = 1 << 22
_LONGEST_PART = 1 << 26
_END, _AGAIN = 0xFFFFFFFF, 0xFFFFFFFE


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
        self._coming: Tuple[int, bytearray] = (-1, bytearray())
        """The number of the part that comes now, and its bytes so far, which may still turn out to be damaged."""
        self.port = PeerServer(secret, pem, folder, self._answer).port

    def has_more(self) -> None:
        """Pass on a part that has come, and is right."""
        self.comes(-1, bytearray())

    def comes(self, number: int, data: bytearray) -> None:
        """Pass on what has come of a part: `data` grows from call to call."""
        self._coming = number, data
        with self._changed:
            self._changed.notify_all()

    def _answer(self, peer: ssl.SSLSocket) -> None:
        size = int.from_bytes(exactly(peer, 4), "big")
        if size > _LONGEST_RANGES:
            return
        for number in part_numbers(exactly(peer, size).decode("ascii"), len(self._hashes)):
            self._send(number, peer)

    def _send(self, number: int, peer: ssl.SSLSocket) -> None:
        """Send a part as it comes, and signs of life meanwhile. Raises EOFError after a long wait."""
        now = time.monotonic()
        deadline, sign = now + _COMING, now + _SIGN
        sent: Union[bytes, bytearray] = b""
        size = 0
        while True:
            coming, data = self._coming
            whole = None if coming == number else self._part(number)
            if whole is not None or coming == number:
                source = data if whole is None else whole
                if source is not sent and source[:size] != sent[:size]:
                    # What came before was damaged, or comes again from another host.
                    peer.sendall(_word(_AGAIN))
                    size = 0
                sent = source
                end = len(source) if whole is not None else len(source) // PIECE * PIECE
                for start in range(size, end, PIECE):
                    piece = source[start : min(start + PIECE, end)]
                    peer.sendall(_word(len(piece)) + piece)
                    sign = time.monotonic() + _SIGN
                size = max(size, end)
                if whole is not None:
                    peer.sendall(_word(_END))
                    return
            now = time.monotonic()
            if now > deadline:
                raise EOFError
            if now > sign:
                sign = now + _SIGN
                peer.sendall(_word(0))
            with self._changed:
                # A part may have come between the look and this wait.
                self._changed.wait(min(deadline - now, 0.05))

    def _part(self, number: int) -> Optional[bytes]:
        for path, offset in self._places(number):
            data = read_part(path, offset, self._part_size, self._hashes[number])
            if data is not None:
                return data
        return None


def _word(number: int) -> bytes:
    return number.to_bytes(4, "big")


def fetch(
    addresses: Sequence[Tuple[str, int]],
    secret: str,
    fingerprint: str,
    ranges: str,
    take: Callable[[bytes], bool],
    more: Callable[[bytearray], None],
) -> None:
    """Fetch parts from the first address with an answer. `take` gets the parts in order; False from `take` ends the call.

    `more` is called now and then while a part comes, with its bytes so far. Returns early if the peer stops to send: the caller
    counts the parts.
    """
    peer = dial(addresses, secret, fingerprint)
    if peer is None:
        return
    try:
        with peer:
            words = ranges.encode("ascii")
            peer.sendall(len(words).to_bytes(4, "big") + words)
            while take(_next_part(peer, more)):
                pass
    except (EOFError, OSError, ValueError):
        return


def _next_part(peer: ssl.SSLSocket, more: Callable[[bytearray], None]) -> bytes:
    """Raises EOFError for a part that takes too long or is too long."""
    deadline = time.monotonic() + _COMING
    data = bytearray()
    while True:
        size = int.from_bytes(exactly(peer, 4, deadline), "big")
        if size == _END:
            return bytes(data)
        if size == _AGAIN:
            data = bytearray()
        elif len(data) + size > _LONGEST_PART:
            raise EOFError
        elif size:
            data += exactly(peer, size, deadline)
        more(data)
