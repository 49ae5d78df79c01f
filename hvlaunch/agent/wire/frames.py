"""Frames between driver and agent: two lengths, a small JSON header, raw bytes.

The header has the type and small values; the body is output, stdin, or the workers of a `start`.
docs/internals/wire.md lists the types.

Frames travel in pieces. A start-up file of the login shell can leave a program running that prints into the channel for
as long as it likes. A write of at most PIPE_BUF bytes into a pipe is atomic (POSIX, write; pipe(7)): each piece is a
single write, with a mark and a number before it and a mark behind it. Foreign output can only stand between pieces, and
driver/links/agent_channel.py separates it.
"""

from __future__ import annotations

import struct

from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.shapes import misfit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

    from hvlaunch.agent.wire.shapes import Choice, Form

    Frame = Tuple[Dict[str, Any], bytes]

__all__ = [
    "END",
    "ERRAND_CHUNK",
    "ERRAND_WINDOW",
    "FRAME_COST",
    "HEAD",
    "LAST_OUTPUT",
    "LONGEST_ARGUMENTS",
    "LONGEST_ERROR",
    "LONGEST_RESULT",
    "LONGEST_TEXT",
    "LONGEST_TRACEBACK",
    "MOST_ADDRESSES",
    "MOST_ERRANDS",
    "MOST_GPUS",
    "MOST_RELAYED",
    "NUMBERS",
    "OUTPUT_CHUNK",
    "PROTOCOL",
    "RELAY_CHUNK",
    "RELAY_WINDOW",
    "ROOM",
    "START",
    "BadFrame",
    "Decoder",
    "PieceWriter",
    "encode",
]

PROTOCOL = 5

LONGEST_TEXT = 4096
"""Characters of a cause, a path, or a name."""
LONGEST_ERROR = 1 << 18
"""Bytes of a worker's error file."""
LONGEST_TRACEBACK = 1 << 16
LONGEST_ARGUMENTS = LONGEST_RESULT = 1 << 20
"""Bytes of an errand's arguments and of its result, as JSON."""
ERRAND_WINDOW = 1 << 20
"""Bytes of an errand's stream that one side may send before the other has taken any."""
ERRAND_CHUNK = 1 << 16
"""The most bytes of a stream in one frame."""
MOST_ERRANDS = 16
"""Errands that run on one host at a time."""
MOST_ADDRESSES = 4096
MOST_GPUS = 256
OUTPUT_CHUNK = 1 << 16
"""Bytes of output in one frame."""
FRAME_COST = 256
"""Credit for each output frame besides its bytes: the driver keeps frames until they are printed, even small ones."""
LAST_OUTPUT = 1 << 20
"""Bytes of each stream that the agent may send without credit once the worker has ended."""
RELAY_WINDOW = 1 << 18
"""Bytes of a relayed connection that either side may send before the other has passed any on."""
RELAY_CHUNK = 1 << 15
"""Limit for a relayed frame: an output frame waits for at most this many bytes."""
MOST_RELAYED = 1024
"""Connections that are relayed for one host at a time."""

START = b"\x00\xfehvl\xfe\x00\x01"
"""The mark before a piece: no text contains it."""

END = b"\x02\xfdhv"
HEAD = struct.Struct("!8sIH")
NUMBERS = 0xFFFFFFFF
_PIPE_BUF = 4096
ROOM = _PIPE_BUF - HEAD.size - len(END)

_LENGTHS = struct.Struct("!II")
_MAX_HEADER = 1 << 20
_MAX_BODY = 1 << 28


class BadFrame(Exception):
    """The bytes are no frame: the other side is not hvlaunch, or another program wrote into the channel."""


def encode(header: Dict[str, Any], body: bytes = b"") -> bytes:
    text = dumps(header).encode("ascii")
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Splits received bytes into frames. With a `table` of forms, raises BadFrame for a frame without a form."""

    def __init__(
        self, table: Optional[Mapping[str, Union[Form, Choice]]] = None, most: int = _MAX_BODY
    ) -> None:
        """A body may have at most `most` bytes."""
        self._table = table
        self._most = most
        self._chunks: List[bytes] = []
        self._have = 0
        self._need = _LENGTHS.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with `data`. Raises BadFrame."""
        # Joined only once a frame is whole: joining at each read would copy a long body again and again.
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._need:
            return
        buffer = b"".join(self._chunks)
        start = 0
        while True:
            self._need = _LENGTHS.size
            if len(buffer) - start < self._need:
                break
            header_size, body_size = _LENGTHS.unpack_from(buffer, start)
            # Checked before the bytes have come, so that a stranger can't make memory grow.
            if header_size > _MAX_HEADER or body_size > self._most:
                raise BadFrame("a frame of %d + %d bytes" % (header_size, body_size))
            self._need += header_size + body_size
            if len(buffer) - start < self._need:
                break
            split = start + _LENGTHS.size + header_size
            end = start + self._need
            try:
                header = loads(buffer[start + _LENGTHS.size : split].decode("ascii"))
            except (ValueError, RecursionError) as error:
                raise BadFrame("a header that is not JSON: %s" % error) from None
            # Checked here, because the table is looked up by the type.
            if not isinstance(header, dict) or not isinstance(header.get("type"), str):
                raise BadFrame("a header without a type")
            body = buffer[split:end]
            if self._table is not None:
                wrong = misfit(self._table, header, body)
                if wrong is not None:
                    raise BadFrame(wrong)
            # A generator, so that frames before a broken frame are still handled.
            yield header, body
            start = end
        partial = buffer[start:]
        self._chunks = [partial] if partial else []
        self._have = len(partial)


class PieceWriter:
    """Cuts the bytes of a channel into numbered pieces."""

    def __init__(self) -> None:
        self._number = 0

    def cut(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces of `data`, each for a single write."""
        for start in range(0, len(data), ROOM):
            part = data[start : start + ROOM]
            yield b"".join((HEAD.pack(START, self._number, len(part)), part, END))
            self._number = (self._number + 1) & NUMBERS
