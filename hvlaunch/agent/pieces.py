"""Bytes through a pipe that others may write to as well, cut in pieces that nothing gets into.

A start-up file can leave something running that prints into our channel for as long as it likes. A
write of at most PIPE_BUF bytes goes into a pipe in one go, or not at all (POSIX, write; pipe(7)): so
each piece is one write, with a mark and a number before it and another mark behind it, and what others
print can only be between pieces, where it is told from them (driver/links/piece_reader.py).
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

__all__ = ["END", "HEAD", "NUMBERS", "ROOM", "START", "PieceWriter"]

START = b"\x00\xfehvl\xfe\x00\x01"
"""Before each piece: no text has it."""

END = b"\x02\xfdhv"
HEAD = struct.Struct("!8sIH")
NUMBERS = 0xFFFFFFFF
_PIPE_BUF = 4096
ROOM = _PIPE_BUF - HEAD.size - len(END)


class PieceWriter:
    """Makes the pieces of one channel, which are numbered."""

    def __init__(self) -> None:
        self._number = 0

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The pieces of `data`, each for one write."""
        for start in range(0, len(data), ROOM):
            part = data[start : start + ROOM]
            yield b"".join((HEAD.pack(START, self._number, len(part)), part, END))
            self._number = (self._number + 1) & NUMBERS
