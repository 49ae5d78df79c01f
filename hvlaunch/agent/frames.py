"""Frames between driver and agent: two lengths, a small JSON header, raw bytes.

The header says what it is ("type") and carries the small facts; the body is output, stdin, or the
workers of a `start`. docs/architecture.md lists the types.
"""

from __future__ import annotations

import struct

from hvlaunch.agent.quick import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Tuple

    Frame = Tuple[Dict[str, Any], bytes]

__all__ = ["PROTOCOL", "BadFrame", "Decoder", "encode"]

PROTOCOL = 2

_LENGTHS = struct.Struct("!II")
_MAX_HEADER = 1 << 20
_MAX_BODY = 1 << 28


class BadFrame(Exception):
    """The bytes are no frame: the other side is not ours, or something else wrote into the channel."""


def encode(header: Dict[str, Any], body: bytes = b"") -> bytes:
    text = dumps(header).encode("ascii")
    return _LENGTHS.pack(len(text), len(body)) + text + body


class Decoder:
    """Bytes in, as they come; frames out, once whole."""

    def __init__(self) -> None:
        self._chunks: List[bytes] = []
        self._have = 0
        self._need = _LENGTHS.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with `data`. Raises BadFrame."""
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
            if header_size > _MAX_HEADER or body_size > _MAX_BODY:
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
            if not isinstance(header, dict) or not isinstance(header.get("type"), str):
                raise BadFrame("a header without a type")
            yield header, buffer[split:end]
            start = end
        rest = buffer[start:]
        self._chunks = [rest] if rest else []
        self._have = len(rest)
