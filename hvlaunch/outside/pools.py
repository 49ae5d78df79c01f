"""Warm pools as other programs of their user see them: their directories, and requests to the process of a pool."""

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvlaunch.errors import EXIT_HOSTS, BadUsage, HvlaunchError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import (
    ABOUT,
    CONTROL,
    IN_MAKING,
    check_root,
    has_driver,
    is_own_directory,
    jobs_directory,
    reachable,
)
from hvlaunch.owners import peer_is_own

__all__ = [
    "STREAM_DATA",
    "STREAM_ENDED",
    "STREAM_HEAD",
    "KnownPool",
    "PoolGone",
    "ask",
    "find_pool",
    "known_pools",
    "open_stream",
    "pools_directory",
]

STREAM_HEAD = struct.Struct("!BI")
"""Header of each part that a pool sends to a driver: kind and size."""
STREAM_DATA, STREAM_ENDED = range(2)
_LONGEST_ANSWER = 1 << 26


class PoolGone(HvlaunchError):
    """The process of a warm pool does not answer: it has ended or was killed.

    Try: `hvlaunch pool status`, then `hvlaunch pool up` again (docs/guides/pools.md).
    """

    exit_code = EXIT_HOSTS


class KnownPool(NamedTuple):
    """A warm pool as its directory describes it; `about` has the facts of its start."""

    name: str
    directory: Path
    about: Mapping[str, Any]
    is_up: bool
    """True if the pool's process lives."""


def pools_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of all pools, beside that of the jobs. Raises NoJobDirectory."""
    return jobs_directory(environ).with_name("pools")


def known_pools(root: Path) -> list[KnownPool]:
    """Return all pools of this user on this machine, sorted by name.

    Raises NoJobDirectory if another user could put directories there.
    """
    pools: list[KnownPool] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        check_root(root)
        for name in sorted(os.listdir(root)):  # noqa: PTH208 (names alone)
            with suppress(OSError, ValueError):
                if not name.startswith(IN_MAKING) and is_own_directory(root / name):
                    about = json.loads((root / name / ABOUT).read_bytes())
                    pools.append(KnownPool(name, root / name, about, has_driver(root / name)))
    return pools


def find_pool(root: Path, name: str) -> KnownPool:
    """Return the pool of this name. Raises BadUsage if its process does not live."""
    pools = known_pools(root)
    pool = next((candidate for candidate in pools if candidate.name == name), None)
    if pool is not None and pool.is_up:
        return pool
    up = ", ".join(pool.name for pool in pools if pool.is_up) or "none"
    cause = f"there is no pool {name}" if pool is None else f"the process of pool {name} was killed"
    raise BadUsage(f"{cause}; up: {up}", hint=f"hvlaunch pool up {name} -H HOSTS")


def ask(pool: KnownPool, request: Mapping[str, Any], timeout: float = 20.0) -> Mapping[str, Any]:
    """Send a request to the pool's process; return the answer. Raises PoolGone, and BadUsage for a refusal."""
    try:
        with _connected(pool, timeout) as link:
            link.sendall(json.dumps(request).encode() + b"\n")
            answer: Mapping[str, Any] = json.loads(_all_of(link))
    except (OSError, ValueError):
        raise PoolGone(
            f"pool {pool.name}: its process does not answer", hint="hvlaunch pool status"
        ) from None
    if "refused" in answer:
        raise BadUsage(answer["refused"], hint=answer.get("hint"))
    return answer


def open_stream(pool: KnownPool, timeout: float = 20.0) -> socket.socket:
    """Connect for a stream to a new agent. Raises OSError.

    The caller sends the request first, then bytes for the agent; it receives parts with STREAM_HEAD.
    """
    with _connected(pool, timeout) as link:
        link.settimeout(None)
        return link.dup()


@contextmanager
def _connected(pool: KnownPool, timeout: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, reachable(pool.directory) as path:
        link.settimeout(timeout)
        link.connect(f"{path}/{CONTROL}")
        if not peer_is_own(link):
            raise PermissionError("another user's program is there")
        yield link


def _all_of(link: socket.socket) -> bytes:
    answer = bytearray()
    while len(answer) <= _LONGEST_ANSWER and (data := link.recv(1 << 16)):
        answer += data
    return bytes(answer)
