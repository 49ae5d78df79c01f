"""The reader for an agent's byte stream, sent in pieces to tell other programs' output apart.

agent/wire/frames.py has the writer.
"""

from __future__ import annotations  # tests run it on each host's Python

from collections.abc import Callable

from hvlaunch.agent.wire.frames import END, HEAD, NUMBERS, ROOM, START

__all__ = ["Garbled", "PieceReader"]


class Garbled(Exception):
    """Another program wrote into the middle of a piece: the channel does not keep writes together as POSIX pipes do."""


class PieceReader:
    """Joins pieces. Bytes between pieces go to `noise` on arrival."""

    def __init__(self, noise: Callable[[bytes], None]) -> None:
        self._noise = noise
        self._incomplete = b""
        self._number = 0

    def feed(self, data: bytes) -> bytes:
        """Return the content of the pieces that are complete with `data`. Raises Garbled."""
        data = self._incomplete + data
        contents = []
        at = 0
        while len(data) - at >= HEAD.size:
            mark, number, size = HEAD.unpack_from(data, at)
            # Bytes outside of pieces: skip to the next mark, or to a part of a mark at the end of the data.
            if mark != START:
                begin = _next_start(data, at + 1)
                self._noise(data[at:begin])
                at = begin
                continue
            end = at + HEAD.size + size
            if number != self._number or size > ROOM:
                raise Garbled
            if len(data) < end + len(END):
                break
            if not data.startswith(END, end):
                raise Garbled
            self._number = (number + 1) & NUMBERS
            contents.append(data[at + HEAD.size : end])
            at = end + len(END)
        if not START.startswith(data[at : at + len(START)]):
            begin = _next_start(data, at + 1)
            self._noise(data[at:begin])
            at = begin
        self._incomplete = data[at:]
        return b"".join(contents)


def _next_start(data: bytes, at: int) -> int:
    """Return the offset of the next start of a piece, perhaps a partial one at the end; else the end."""
    begin = data.find(START, at)
    if begin >= 0:
        return begin
    for size in range(len(START) - 1, 0, -1):
        if len(data) - size >= at and data.endswith(START[:size]):
            return len(data) - size
    return len(data)
