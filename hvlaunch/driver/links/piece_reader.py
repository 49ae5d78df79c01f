"""Puts together what an agent has cut into pieces; see agent/wire/frames.py."""

from __future__ import annotations  # tests run it on each host's Python

from collections.abc import Callable

from hvlaunch.agent.wire.frames import END, HEAD, NUMBERS, ROOM, START

__all__ = ["Garbled", "PieceReader"]


class Garbled(Exception):
    """Something was written into the middle of a piece: what carries us is no pipe as POSIX has it."""


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
        while len(data) - at >= HEAD.size:
            mark, number, size = HEAD.unpack_from(data, at)
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
            found.append(data[at + HEAD.size : end])
            at = end + len(END)
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
