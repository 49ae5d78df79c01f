"""Processes around a worker: its group, its marked descendants, and the launcher's daemon above the agent."""

from __future__ import annotations

import os
import time

from hvlaunch.agent import reaper
from hvlaunch.agent.quick import in_time, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Sequence, Set, Tuple

__all__ = ["end_daemon", "kill_marked", "programs_of"]

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


_PAUSE = 0.0005


def kill_marked(marks: Sequence[bytes], patience: float) -> None:
    """SIGKILL the descendants that have one of these NAME=VALUE in the environment that they were started with, and theirs.

    They are reaped too, or at least killed, when `patience` seconds are over; other children are not reaped. Where it takes
    longer to find them, a thread goes on: no later worker has these marks.
    """

    def is_marked(pid: int) -> bool:
        try:
            with open("/proc/%d/environ" % pid, "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            return False  # ended, or another user's
        return any(mark in variables for mark in marks)

    def kill() -> None:
        deadline = time.monotonic() + patience
        left: Set[int] = set()
        while True:
            left.update(reaper.stop_and_kill(deadline, is_marked))
            left = {pid for pid in left if not _is_gone(pid)}
            if not left or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE)

    in_time(kill, patience, None)


def _is_gone(pid: int) -> bool:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    return not os.path.exists("/proc/%d" % pid)


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
