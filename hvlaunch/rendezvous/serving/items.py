"""How a store file is written: items, in blocks with checksums. Bytes in, bytes out; no file here."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "APPENDED",
    "DELETED",
    "DONE",
    "MARK",
    "NOTE",
    "SET",
    "BadBlocks",
    "Item",
    "block",
    "blocks",
    "items",
    "pack",
]

SET, APPENDED, DELETED = b"=", b"+", b"-"
"""A change of a key: number is its version, then scope, key, and the value or what was added behind it."""
DONE = b"#"
"""A request that is done once: number is its answer's status, then its id, the answer's body and its header lines."""
NOTE = b"."
"""What the server knows beside its store: a name, a value."""
MARK = b"v"
"""The store's version, and in decimal digits the latest change that its deletions may lack."""

_ITEM = struct.Struct("<cQIII")
_BLOCK = struct.Struct("<II")
_CHECK = struct.Struct("<I")
_HEAD = _BLOCK.size + _CHECK.size
_KINDS = frozenset((SET, APPENDED, DELETED, DONE, NOTE, MARK))


class BadBlocks(ValueError):
    """Bytes that no writer has left like this, be it killed at any moment; the message says why."""


class Item(NamedTuple):
    """`kind` says what the others are."""

    kind: bytes
    number: int
    first: bytes
    second: bytes = b""
    third: bytes = b""


def pack(
    kind: bytes, number: int, first: bytes, second: bytes = b"", third: bytes = b""
) -> tuple[bytes, ...]:
    """The pieces of an item."""
    return _ITEM.pack(kind, number, len(first), len(second), len(third)), first, second, third


def block(pieces: Iterable[bytes], check: int) -> tuple[bytes, bytes, int]:
    """Items that are on record together or not at all: head, body, and the check that the next block is given.

    `check` is the block's before it, 0 for the first: so none can be missing, doubled or from another file.
    """
    body = b"".join(pieces)
    check = zlib.crc32(body, check)
    head = _BLOCK.pack(len(body), check)
    return head + _CHECK.pack(zlib.crc32(head)), body, check


def blocks(data: memoryview) -> Iterator[tuple[memoryview, int, int]]:
    """Each block's body, its check, and where it ends; not the last one, if its writer was killed in the middle of it.

    Raises BadBlocks where others follow a block that is not whole.
    """
    at = check = 0
    while at + _HEAD <= len(data):
        head = data[at : at + _HEAD]
        size, expected = _BLOCK.unpack_from(head)
        if not size or zlib.crc32(head[: _BLOCK.size]) != _CHECK.unpack_from(head, _BLOCK.size)[0]:
            break
        end = at + _HEAD + size
        if end > len(data):
            return
        body = data[at + _HEAD : end]
        check = zlib.crc32(body, check)
        if check != expected:
            if end < len(data):
                raise BadBlocks(f"a checksum is wrong, at byte {at}")
            return
        yield body, check, end
        at = end
    # After a loss of power, a file may be longer than what was written to it: by zeros.
    if len(data) - at >= _HEAD and any(data[at:]):
        raise BadBlocks(f"what follows byte {at} is no block")


def items(body: memoryview) -> Iterator[Item]:
    """What is in a block. Raises BadBlocks."""
    at = 0
    while at < len(body):
        if at + _ITEM.size > len(body):
            raise BadBlocks("an item is cut off")
        kind, number, *sizes = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        if kind not in _KINDS or at + sum(sizes) > len(body):
            raise BadBlocks("an item is of no known kind")
        parts = []
        for size in sizes:
            parts.append(bytes(body[at : at + size]))
            at += size
        yield Item(kind, number, *parts)
