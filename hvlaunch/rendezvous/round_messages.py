"""How workers of an elastic job and its driver speak of rounds: small JSON values in four scopes.

A worker asks for a place under its own id, and watches the place that it is given; the driver says which
rounds are over. docs/architecture.md has the course of it.
"""

import json
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ASKS",
    "BEATS",
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


class Ask(NamedTuple):
    """The worker is ready for a place in a round after `round` (-1: any), with a state of `commit` commits (-1: none)."""

    round: int
    commit: int
    cause: str | None = None
    """Why it left `round`, where that was not the driver's wish."""


class Grant(NamedTuple):
    """A worker's place in a round. `leave` is why there is none for it, and never will be."""

    round: int
    rank: int = -1
    size: int = 0
    local_rank: int = -1
    local_size: int = 0
    cross_rank: int = -1
    cross_size: int = 0
    master_addr: str = ""
    """Rank 0's host, as this worker's host reaches it."""
    interface: str | None = None
    """This host's interface towards the others."""
    leave: str | None = None


class Notice(NamedTuple):
    """What becomes of a round. `state` is "broken": leave it now; or "changing": leave it at the next commit."""

    state: str
    cause: str


class Beat(NamedTuple):
    """The worker lives, and has made `commit` commits. After its `last` one it is silent."""

    commit: int
    last: bool = False
    round: int = -1
    """The newest round in which it has met the others (-1: none)."""
    done: bool = False
    """Whether its training has come to its end."""


_LONGEST = 1 << 16
_LARGEST = 1 << 53  # what JSON's readers agree on

T = TypeVar("T", Ask, Grant, Notice, Beat)


def encode(message: Ask | Grant | Notice | Beat) -> bytes:
    return json.dumps(message._asdict(), separators=(",", ":")).encode("ascii")


def decode(kind: type[T], value: bytes) -> T:
    """Raises ValueError where the value is no such message: any worker of the job can write any."""
    if len(value) > _LONGEST:
        raise ValueError(f"not a valid {kind.__name__}: {len(value)} bytes")
    try:
        fields: Any = json.loads(value)
        message = kind(**fields)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a valid {kind.__name__}: {error}") from None
    kinds = kind.__annotations__
    for name, field in message._asdict().items():
        if not isinstance(field, kinds[name]) or isinstance(field, bool) is not (kinds[name] is bool):
            raise ValueError(f"not a valid {kind.__name__}: {name} is {field!r}")
        if isinstance(field, int) and not -1 <= field <= _LARGEST:
            raise ValueError(f"not a valid {kind.__name__}: a wrong {name}")
    return message


def worker_id(host: str, slot: int, start: int) -> str:
    """No two workers of a job have the same. `start` counts those of the slot from 0."""
    return f"{host}/{slot}/{start}"


def worker_of(name: str) -> tuple[str, int, int]:
    """Host, slot and start of a worker_id. Raises ValueError."""
    host, slot, start = name.rsplit("/", 2)
    worker = host, int(slot), int(start)
    if worker_id(*worker) != name:
        raise ValueError(f"not a worker's id: {name!r}")
    return worker
