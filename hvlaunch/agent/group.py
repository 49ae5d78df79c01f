"""Whom of a worker's process group a stop asks to end."""

from __future__ import annotations

import os

from hvlaunch.agent.in_time import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Tuple

__all__ = ["programs_of"]

_SPAWNED = b"from multiprocessing."
"""How the code begins that Python's multiprocessing gives to `python -c`."""

_PATIENCE = 1.0


def programs_of(group: int) -> List[int]:
    """The group's leader, and who else of the group runs a program of its own; empty where /proc can't tell, or not in time.

    Left out is what a program made of itself: a process that was forked and runs on without exec, or that
    Python's multiprocessing spawned. A data loader's are such. They are their parent's to end, which may
    still need them to save its state, and takes it for an error when they are gone.
    """
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
    """The processes of the group, and the parent of each."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            parent, its_group = _parent_and_group(name)
            if its_group == group:
                found[int(name)] = parent
    return found


def _parent_and_group(pid: str) -> Tuple[int, int]:
    """Zeros where the process is gone."""
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
