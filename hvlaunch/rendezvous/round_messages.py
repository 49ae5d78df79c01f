"""Messages about rounds between an elastic job's workers and its driver: small JSON values in four scopes.

A worker asks for a place under its own id and watches for an answer; the driver announces the end of rounds.
docs/internals/elastic-jobs.md has the course.
"""

import json
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ASKS",
    "BEATS",
    "KEPT",
    "PLACES",
    "ROUNDS",
    "Ask",
    "Beat",
    "Grant",
    "Notice",
    "decode",
    "encode",
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
