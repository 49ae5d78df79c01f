"""Whether a worker keeps to itself: it has a library for jobs of several processes, and no connection but to the web."""

from __future__ import annotations

import os

from hvlaunch.agent.in_time import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Set, Tuple

__all__ = ["MPI", "look", "was_used"]

MPI = "mpi4py"
_LIBRARIES = (("libtorch_cpu", "torch"), ("libtensorflow_framework", "tensorflow"), ("mpi4py/MPI.", MPI))
_WEB = (":0050", ":01BB")
"""The ports of http and https: models, data sets and reports come and go there, and no worker is met."""

_MOST = 100
"""Processes of a worker: of more, perhaps of a fork bomb, each look would hold the agent up."""
_PATIENCE = 1.0


def look(pid: int) -> Tuple[bool, Optional[str]]:
    """Whether the worker or a descendant has a TCP socket, or can't be seen; and the library that one has loaded."""
    unseen: Tuple[bool, Optional[str]] = (True, None)
    return in_time(lambda: _look(pid), _PATIENCE, unseen)


def _look(pid: int) -> Tuple[bool, Optional[str]]:
    library = None
    try:
        pids = _tree(pid)
        sockets: Set[str] = set()
        for one in pids:
            for fd in os.listdir("/proc/%d/fd" % one):
                target = os.readlink("/proc/%d/fd/%s" % (one, fd))
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
            library = library or _library(one)
        if not sockets:
            return False, library
        return any(inode in sockets and not peer.endswith(_WEB) for _, peer, inode in _tcp()), library
    except OSError:
        return True, library


def was_used(port: int) -> bool:
    """Whether any connection to the port, or from it, is there, or was a moment ago; or somebody listens on it."""
    end = ":%04X" % port
    return any(own.endswith(end) or peer.endswith(end) for own, peer, _ in _tcp())


def _tcp() -> List[Tuple[str, str, str]]:
    """All TCP sockets of this host: their own address, their peer's, their inode."""
    found: List[Tuple[str, str, str]] = []
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                rows = [line.split() for line in listing.readlines()[1:]]
                found.extend((row[1], row[2], row[9]) for row in rows)
        except OSError:  # noqa: PERF203 (two turns)
            continue  # a kernel without IPv6
    return found


def _tree(pid: int) -> List[int]:
    found = [pid]
    for one in found:  # grows meanwhile
        if len(found) > _MOST:
            raise OSError("too many to look at")
        for thread in os.listdir("/proc/%d/task" % one):
            with open("/proc/%d/task/%s/children" % (one, thread)) as listing:
                found.extend(int(child) for child in listing.read().split())
    return found


def _library(pid: int) -> Optional[str]:
    with open("/proc/%d/maps" % pid) as file:
        maps = file.read()
    return next((library for text, library in _LIBRARIES if text in maps), None)
