"""Bytes through a pipe that others may write to as well, cut in pieces that nothing gets into.

A start-up file can leave something running that prints into our channel for as long as it likes. A
write of at most PIPE_BUF bytes goes into a pipe in one go, or not at all (POSIX, write; pipe(7)): so
each piece is one write, with a mark and a number before it and another mark behind it, and what others
print can only be between pieces, where it is told from them.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator

__all__ = ["START", "Garbled", "PieceReader", "PieceWriter"]

START = b"\x00\xfehvl\xfe\x00\x01"
"""Before each piece: no text has it."""

_END = b"\x02\xfdhv"
_HEAD = struct.Struct("!8sIH")
_NUMBERS = 0xFFFFFFFF
_PIPE_BUF = 4096
_ROOM = _PIPE_BUF - _HEAD.size - len(_END)


class Garbled(Exception):
    """Something was written into the middle of a piece: what carries us is no pipe as POSIX has it."""


class PieceWriter:
    """Makes the pieces of one channel, which are numbered."""

    def __init__(self) -> None:
        self._number = 0

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The pieces of `data`, each for one write."""
        for start in range(0, len(data), _ROOM):
            part = data[start : start + _ROOM]
            yield b"".join((_HEAD.pack(START, self._number, len(part)), part, _END))
            self._number = (self._number + 1) & _NUMBERS


class PieceReader:
    """Puts pieces together again; what is between them goes to `noise`, as it comes."""

    def __init__(self, noise: Callable[[bytes], None]) -> None:
        self._noise = noise
        self._rest = b""
        self._number = 0

    def feed(self, data: bytes) -> bytes:
        """What the pieces held that are complete with `data`. Raises Garbled."""
        data = self._rest + data
        found = []
        at = 0
        while len(data) - at >= _HEAD.size:
            mark, number, size = _HEAD.unpack_from(data, at)
            if mark != START:
                begin = _next_start(data, at + 1)
                self._noise(data[at:begin])
                at = begin
                continue
            end = at + _HEAD.size + size
            if number != self._number or size > _ROOM:
                raise Garbled
            if len(data) < end + len(_END):
                break
            if not data.startswith(_END, end):
                raise Garbled
            self._number = (number + 1) & _NUMBERS
            found.append(data[at + _HEAD.size : end])
            at = end + len(_END)
        if not START.startswith(data[at : at + len(START)]):
            begin = _next_start(data, at + 1)
            self._noise(data[at:begin])
            at = begin
        self._rest = data[at:]
        return b"".join(found)


def _next_start(data: bytes, at: int) -> int:
    """Where the next piece starts, or may start; else the end."""
    begin = data.find(START, at)
    if begin >= 0:
        return begin
    for known in range(len(START) - 1, 0, -1):
        if len(data) - known >= at and data.endswith(START[:known]):
            return len(data) - known
    return len(data)
