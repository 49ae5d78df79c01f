"""The bodies of the rendezvous' messages: several values in one body, and news of rounds.

A body with several values has a line of JSON that describes them, and then their bytes in its order.

News of rounds between an elastic job's workers and its driver are small JSON values in four scopes. A worker asks for a place
under its own id and watches for an answer; the driver announces the end of rounds. docs/internals/elastic-jobs.md has the
course.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "ASKS",
    "BEATS",
    "KEPT",
    "LONGEST_NAME",
    "MOST_METRICS",
    "PLACES",
    "PROGRESS",
    "ROUNDS",
    "Ask",
    "Beat",
    "Changes",
    "Grant",
    "MalformedBatch",
    "Notice",
    "check_keys",
    "decode",
    "encode",
    "pack",
    "read_keys",
    "sizes",
    "split",
    "unpack",
    "worker_id",
    "worker_of",
]

ASKS = "hvlaunch.asks"
"""Ask, by worker: written by workers."""
PLACES = "hvlaunch.places"
"""Grant, by worker: written by the driver."""
ROUNDS = "hvlaunch.rounds"
"""Notice, by round: written by the driver."""
BEATS = "hvlaunch.beats"
"""Beat, by worker: written by workers."""
KEPT = "hvlaunch.kept"
"""`here.HOST` after the first commit there; `list.ID` and `want.ID` ask for all commits and for one; `done.ID` is the answer.

`cost.WORKER` is a progress report of rank 0: `step` is the number of commits, the metrics are `delayed` (seconds without training, all
commits together) and `whole` (seconds until the newest commit was whole in memory).
"""
PROGRESS = "hvlaunch.progress"
"""Progress reports, by worker: written by workers."""
MOST_METRICS = 32
"""Metrics of a progress report."""
LONGEST_NAME = 64
"""Letters of a metric's name."""


class Ask(NamedTuple):
    """A worker is ready for a round after `round` (-1: any) with a state of `commit` commits (-1: none)."""

    round: int
    commit: int
    cause: str | None = None
    """The reason for leaving `round`, unless the driver ordered it."""


class Grant(NamedTuple):
    """A worker's place in a round. `leave` is the reason for a final refusal."""

    round: int
    rank: int = -1
    size: int = 0
    local_rank: int = -1
    local_size: int = 0
    cross_rank: int = -1
    cross_size: int = 0
    master_addr: str = ""
    """Rank 0's host, under the address for this worker's host."""
    interface: str | None = None
    """This host's network interface towards the other hosts."""
    leave: str | None = None
    variables: str | None = None
    """Variables for libraries in place of `interface`: `NAME=VALUE NAME=VALUE`."""


class Notice(NamedTuple):
    """The state of a round: "broken" (leave now) or "changing" (leave at the next commit)."""

    state: str
    cause: str


class Beat(NamedTuple):
    """A sign of life with the number of commits. After its `last` beat a worker is silent."""

    commit: int
    last: bool = False
    round: int = -1
    """The newest round in which the worker has met the other ranks (-1: none)."""
    done: bool = False
    """True if its training has ended."""


_LONGEST = 1 << 16
_LARGEST = 1 << 53  # JSON readers agree up to here

T = TypeVar("T", Ask, Grant, Notice, Beat)


def encode(message: Ask | Grant | Notice | Beat) -> bytes:
    return json.dumps(message._asdict(), separators=(",", ":")).encode("ascii")


def decode(kind: type[T], value: bytes) -> T:
    """Parse and check a message: each worker can write any bytes. Raises ValueError."""
    # Checked first: a worker could make the driver parse a value of many MiB.
    if len(value) > _LONGEST:
        raise ValueError(f"not a valid {kind.__name__}: {len(value)} bytes")
    try:
        fields: Any = json.loads(value)
        message = kind(**fields)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a valid {kind.__name__}: {error}") from None
    # The annotations are the schema. A bool is an int in Python, and must not pass as a number.
    kinds = kind.__annotations__
    for name, field in message._asdict().items():
        if not isinstance(field, kinds[name]) or isinstance(field, bool) is not (kinds[name] is bool):
            raise ValueError(f"not a valid {kind.__name__}: {name} is {field!r}")
        if isinstance(field, int) and not -1 <= field <= _LARGEST:
            raise ValueError(f"not a valid {kind.__name__}: a wrong {name}")
    return message


def worker_id(host: str, slot: int, start: int) -> str:
    """Return the unique id of a worker in its job. `start` counts the workers of the slot from 0."""
    return f"{host}/{slot}/{start}"


def worker_of(name: str) -> tuple[str, int, int]:
    """Return host, slot and start of a worker_id. Raises ValueError."""
    # From the right: a host's name may have a slash.
    host, slot, start = name.rsplit("/", 2)
    worker = host, int(slot), int(start)
    # Only the canonical form: " 1" and "01" are numbers too.
    if worker_id(*worker) != name:
        raise ValueError(f"not a worker's id: {name!r}")
    return worker


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
