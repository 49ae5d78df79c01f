"""Whether a worker keeps to itself: it has a library for jobs of several processes, and no connection."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Set, Tuple

__all__ = ["MPI", "look", "was_used"]

MPI = "mpi4py"
_LIBRARIES = (("libtorch_cpu", "torch"), ("libtensorflow_framework", "tensorflow"), ("mpi4py/MPI.", MPI))


def look(pid: int) -> Tuple[bool, Optional[str]]:
    """Whether the worker or a descendant has a TCP socket, or can't be seen; and the library that one has loaded."""
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
        return bool(sockets) and not sockets.isdisjoint(_tcp(9)), library
    except OSError:
        return True, library


def was_used(port: int) -> bool:
    """Whether any connection to the port, or from it, is there, or was a moment ago; or somebody listens on it."""
    end = ":%04X" % port
    return any(address.endswith(end) for column in (1, 2) for address in _tcp(column))


def _tcp(column: int) -> List[str]:
    """Of all TCP sockets of this host: 1 is their own address, 2 their peer's, 9 their inode."""
    found: List[str] = []
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                found.extend(line.split()[column] for line in listing.readlines()[1:])
        except OSError:  # noqa: PERF203 (two turns)
            continue  # a kernel without IPv6
    return found


def _tree(pid: int) -> List[int]:
    found = [pid]
    for one in found:  # grows meanwhile
        for thread in os.listdir("/proc/%d/task" % one):
            with open("/proc/%d/task/%s/children" % (one, thread)) as listing:
                found.extend(int(child) for child in listing.read().split())
    return found


def _library(pid: int) -> Optional[str]:
    with open("/proc/%d/maps" % pid) as file:
        maps = file.read()
    return next((library for text, library in _LIBRARIES if text in maps), None)
