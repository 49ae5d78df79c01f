"""The daemon by which a launcher has started this host's processes."""

from __future__ import annotations

import os

from hvlaunch.agent.quick import signal

__all__ = ["end_daemon"]

_DAEMONS = (b"orted", b"prted")
"""What the kernel calls those that wait on for a launcher that does not answer: Open MPI's. Others end with their processes."""


def end_daemon(guardian: int) -> None:
    """Have the parent of this process end, if it is such a daemon, and with it what else it has started (MPI_Comm_spawn)."""
    try:
        with open("/proc/%d/stat" % guardian, "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
        with open("/proc/%d/comm" % parent, "rb") as name:
            if name.read().strip() in _DAEMONS:
                os.kill(parent, signal.SIGTERM)
    except OSError:
        pass  # it has ended, or there is no /proc
