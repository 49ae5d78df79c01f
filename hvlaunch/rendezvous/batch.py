"""Several values in one body: a line of JSON describes them, then their bytes follow in its order."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Changes", "MalformedBatch", "check_keys", "pack", "read_keys", "sizes", "split", "unpack"]


class MalformedBatch(ValueError):
    """A malformed body; the message says why."""


def pack(head: object, values: Iterable[bytes | None] = ()) -> bytes:
    """Return a body: `head` in JSON on a line, then each value except None."""
    # ASCII: the head's length in bytes is then its length in characters, for every language.
    line = json.dumps(head, separators=(",", ":")).encode("ascii")
    return b"".join([line, b"\n", *(value for value in values if value is not None)])


def sizes(values: Iterable[bytes | None]) -> list[int | None]:
    """Return the byte counts of the values for a head; None for a missing value."""
    return [None if value is None else len(value) for value in values]


def split(body: bytes) -> tuple[Any, memoryview]:
    """Split a body into its head and the bytes behind. Raises MalformedBatch."""
    line, newline, _ = body.partition(b"\n")
    if not newline:
        raise MalformedBatch("the first line has no end")
    return _parse(line), memoryview(body)[len(line) + 1 :]


def unpack(sizes: Iterable[int | None], data: memoryview) -> list[bytes | None]:
    """Cut the bytes into values of these sizes. Raises MalformedBatch if the sizes do not add up."""
    values: list[bytes | None] = []
    start = 0
    for size in sizes:
        if size is None:
            values.append(None)
            continue
        # Not isinstance(): a bool is an int, and JSON has both.
        if type(size) is not int or not 0 <= size <= len(data) - start:
            raise MalformedBatch("the sizes do not match the bytes that follow")
        values.append(bytes(data[start : start + size]))
        start += size
    if start != len(data):
        raise MalformedBatch("more bytes follow than the sizes say")
    return values


def read_keys(body: bytes) -> list[str]:
    """Return the keys of a body, a JSON list. Raises MalformedBatch."""
    keys = _parse(body)
    # A client may send any JSON: types are checked before use.
    if not isinstance(keys, list):
        raise MalformedBatch("this is not a list of keys")
    check_keys(keys)
    return keys


def check_keys(keys: Iterable[object]) -> None:
    """Raises MalformedBatch unless each key is a non-empty string in valid Unicode, as in a path."""
    for key in keys:
        if not isinstance(key, str) or not key or not _encodes(key):
            raise MalformedBatch("a key must be a string of at least one character")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    # Deeply nested JSON of an attacker raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise MalformedBatch("this is not JSON") from error


def _encodes(key: str) -> bool:
    # JSON can escape half of a surrogate pair (\ud800), which json.loads() accepts; a path can't
    # contain it.
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


class Changes(NamedTuple):
    """Changes of a scope up to `version`, where the next watch begins: values by key, None for a deleted key."""

    version: int
    values: Mapping[str, bytes | None]
    complete: bool = False
    """The scope has no other keys."""
