"""Processes around a worker: its group, and the launcher's daemon above the agent."""

from __future__ import annotations

import os

from hvlaunch.agent.quick import in_time, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Tuple

__all__ = ["end_daemon", "programs_of"]

_SPAWNED = b"from multiprocessing."
"""Start of the code that Python's multiprocessing gives to `python -c`."""

_PATIENCE = 1.0


def programs_of(group: int) -> List[int]:
    """Return the group's leader, and members that run a program of their own; empty if /proc can't show them in time.

    Processes that a program forked without exec, or spawned by Python's multiprocessing, are left out.
    """
    # Such processes, a data loader's for example, are their parent's to end: it may still need them to save its state,
    # and would take their end for an error.
    return in_time(lambda: _programs_of(group), _PATIENCE, [])


def _programs_of(group: int) -> List[int]:
    parents = _members(group)
    commands = {pid: _command_of(pid) for pid in parents}
    return [
        pid
        for pid, parent in parents.items()
        if pid == group or not (_is_spawned(commands[pid]) or commands[pid] == commands.get(parent))
    ]


def _members(group: int) -> Dict[int, int]:
    """Return the processes of the group, each with its parent."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            parent, its_group = _parent_and_group(name)
            if its_group == group:
                parents[int(name)] = parent
    return parents


def _parent_and_group(pid: str) -> Tuple[int, int]:
    """Return parent and group; zeros if the process is gone."""
    try:
        with open("/proc/%s/stat" % pid, "rb") as stat:
            _, parent, group = stat.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return 0, 0
    return int(parent), int(group)


def _command_of(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as words:
            return words.read()
    except OSError:
        return b""


def _is_spawned(command: bytes) -> bool:
    return any(word.startswith(_SPAWNED) for word in command.split(b"\0"))


_DAEMONS = (b"orted", b"prted")
"""Names of Open MPI's daemons, which wait on for a silent launcher; other daemons end with their processes."""


def end_daemon(guardian: int) -> None:
    """End the launcher's daemon above the guardian, and thereby its other processes (MPI_Comm_spawn)."""
    try:
        with open("/proc/%d/stat" % guardian, "rb") as stat:
            parent = int(stat.read().rpartition(b")")[2].split()[1])
        with open("/proc/%d/comm" % parent, "rb") as name:
            if name.read().strip() in _DAEMONS:
                os.kill(parent, signal.SIGTERM)
    except OSError:
        pass  # the daemon has ended, or /proc is missing
