"""Processes around the workers: marked descendants, and the launcher's daemon above the agent."""

from __future__ import annotations

import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent.quick import has_own_proc, in_time, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Collection, Sequence, Set

__all__ = ["end_daemon", "kill_marked", "kill_others"]

_PAUSE = 0.0005


def kill_marked(marks: Sequence[bytes], patience: float) -> None:
    """Kill the descendants with one of these NAME=VALUE in their first environment, and their families.

    Within `patience` seconds they are reaped too, unlike other children, which may be workers.
    """
    if not has_own_proc():
        return  # their environment can't be read: they end with the job
    # A search that takes longer continues in its thread, which is harmless: no later worker has these marks.

    def is_marked(pid: int) -> bool:
        try:
            with open("/proc/%d/environ" % pid, "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            return False  # the process has ended, or is another user's
        return any(mark in variables for mark in marks)

    in_time(lambda: _kill_chosen(is_marked, patience), patience, None)


def kill_others(sessions: Collection[int], patience: float) -> None:
    """Kill and reap the descendants in other sessions than these."""

    def is_other(pid: int) -> bool:
        try:
            return os.getsid(pid) not in sessions
        except OSError:
            return False  # it has ended

    _kill_chosen(is_other, patience)


def _kill_chosen(is_chosen: Callable[[int], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    left: Set[int] = set()
    while True:
        left.update(reaper.stop_and_kill(deadline, is_chosen))
        left = {pid for pid in left if not _is_gone(pid)}
        if not left or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE)


def _is_gone(pid: int) -> bool:
    # By number, because waitpid(-1) would take the status of a live slot's worker.
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not os.path.exists("/proc/%d" % pid)


_DAEMONS = (b"orted", b"prted")
"""Names of Open MPI's daemons, which wait on for a silent launcher; other daemons end with their processes."""


def end_daemon(guardian: int) -> None:
    """End the launcher's daemon above the guardian, and thereby its other processes (MPI_Comm_spawn)."""
    if not has_own_proc():
        return
    try:
        with open("/proc/%d/stat" % guardian, "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
        with open("/proc/%d/comm" % parent, "rb") as name:
            if name.read().strip() in _DAEMONS:
                os.kill(parent, signal.SIGTERM)
    except OSError:
        pass  # the daemon has ended, or /proc is missing
