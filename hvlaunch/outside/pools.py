"""Warm pools as other programs of their user see them: their directories, and the way to the process of one."""

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch.errors import EXIT_HOSTS, BadUsage, HvlaunchError
from hvlaunch.outside.directory import ABOUT, CONTROL, IN_MAKING, has_driver, jobs_directory, reachable
from hvlaunch.owners import other_writer

__all__ = [
    "LANE_DATA",
    "LANE_ENDED",
    "LANE_HEAD",
    "KnownPool",
    "PoolGone",
    "ask",
    "find_pool",
    "known_pools",
    "open_lane",
    "peer_is_own",
    "pools_directory",
]

LANE_HEAD = struct.Struct("!BI")
"""Before each part of what a pool sends to a driver: what it is, and its size."""
LANE_DATA, LANE_ENDED = range(2)
_LONGEST_ANSWER = 1 << 26


class PoolGone(HvlaunchError):
    """The process of a warm pool does not answer: it has ended, or was killed."""

    exit_code = EXIT_HOSTS


class KnownPool(NamedTuple):
    """A warm pool as its directory tells of it. `about` has what was known when it was made."""

    name: str
    directory: Path
    about: Mapping[str, Any]
    is_up: bool
    """Whether its process lives."""


def pools_directory(environ: Mapping[str, str]) -> Path:
    """Where the directories of warm pools are: beside those of jobs. Raises NoJobDirectory."""
    return jobs_directory(environ).with_name("pools")


def known_pools(root: Path) -> list[KnownPool]:
    """All of this user's on this machine, by name."""
    found: list[KnownPool] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(root)):  # noqa: PTH208 (names alone)
            with suppress(OSError, ValueError):
                if not name.startswith(IN_MAKING) and other_writer((root / name).lstat()) is None:
                    about = json.loads((root / name / ABOUT).read_bytes())
                    found.append(KnownPool(name, root / name, about, has_driver(root / name)))
    return found


def find_pool(root: Path, name: str) -> KnownPool:
    """The pool of this name, whose process lives. Raises BadUsage."""
    pools = known_pools(root)
    found = next((pool for pool in pools if pool.name == name), None)
    if found is not None and found.is_up:
        return found
    up = ", ".join(pool.name for pool in pools if pool.is_up) or "none"
    cause = f"there is no pool {name}" if found is None else f"the process of pool {name} was killed"
    raise BadUsage(f"{cause}; up: {up}", hint=f"hvlaunch pool up {name} -H HOSTS")


def ask(pool: KnownPool, request: Mapping[str, Any], timeout: float = 20.0) -> Mapping[str, Any]:
    """What the pool's process answers. Raises PoolGone, and BadUsage where it refuses."""
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


def open_lane(pool: KnownPool, timeout: float = 20.0) -> socket.socket:
    """A connection to a new agent, once a request is sent, which begins what is said. What follows that goes to the agent; what
    comes is in parts, see LANE_HEAD. Raises OSError.
    """
    with _connected(pool, timeout) as link:
        link.settimeout(None)
        return link.dup()


def peer_is_own(link: socket.socket) -> bool:
    """Whether the program at the other end is this user's or root's; where the kernel does not tell, the directory's mode says so."""
    if not sys.platform.startswith("linux"):
        return True
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(peer[4:8], sys.byteorder) in (0, os.geteuid())


@contextmanager
def _connected(pool: KnownPool, timeout: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, reachable(pool.directory) as path:
        link.settimeout(timeout)
        link.connect(f"{path}/{CONTROL}")
        if not peer_is_own(link):
            raise PermissionError("another user's program is there")
        yield link


def _all_of(link: socket.socket) -> bytes:
    found = bytearray()
    while len(found) <= _LONGEST_ANSWER and (data := link.recv(1 << 16)):
        found += data
    return bytes(found)
