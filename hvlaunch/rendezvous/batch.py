"""Several values in one body: a line of JSON that describes them, then their bytes in its order."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = ["Changes", "MalformedBatch", "check_keys", "pack", "read_keys", "sizes", "split", "unpack"]


class MalformedBatch(ValueError):
    """A body that is no batch; the message says why."""


def pack(head: object, values: Iterable[bytes | None] = ()) -> bytes:
    """The body: `head` in JSON on a line, then the values that are not None."""
    line = json.dumps(head, separators=(",", ":")).encode("ascii")
    return b"".join([line, b"\n", *(value for value in values if value is not None)])


def sizes(values: Iterable[bytes | None]) -> list[int | None]:
    """What a head says of the values, so that unpack can part them: the bytes of each, None where there is none."""
    return [None if value is None else len(value) for value in values]


def split(body: bytes) -> tuple[Any, memoryview]:
    """The head, and the bytes behind it. Raises MalformedBatch."""
    line, newline, _ = body.partition(b"\n")
    if not newline:
        raise MalformedBatch("the first line has no end")
    return _parse(line), memoryview(body)[len(line) + 1 :]


def unpack(sizes: Iterable[int | None], data: memoryview) -> list[bytes | None]:
    """The values of these sizes. Raises MalformedBatch where the bytes are fewer or more."""
    values: list[bytes | None] = []
    start = 0
    for size in sizes:
        if size is None:
            values.append(None)
            continue
        if type(size) is not int or not 0 <= size <= len(data) - start:
            raise MalformedBatch("the sizes do not match the bytes that follow")
        values.append(bytes(data[start : start + size]))
        start += size
    if start != len(data):
        raise MalformedBatch("more bytes follow than the sizes say")
    return values


def read_keys(body: bytes) -> list[str]:
    """The keys of a body that is a JSON list of them. Raises MalformedBatch."""
    keys = _parse(body)
    if not isinstance(keys, list):
        raise MalformedBatch("this is not a list of keys")
    check_keys(keys)
    return keys


def check_keys(keys: Iterable[object]) -> None:
    """Raises MalformedBatch unless all are names that a path could have, too."""
    for key in keys:
        if not isinstance(key, str) or not key or not _encodes(key):
            raise MalformedBatch("a key must be a string of at least one character")


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedBatch("this is not JSON") from error


def _encodes(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


class Changes(NamedTuple):
    """What changed, up to `version`, where the next watch may begin: values by key, None where it was deleted."""

    version: int
    values: Mapping[str, bytes | None]
    complete: bool = False
    """These are all values of the scope: a key that is not among them is not set."""
