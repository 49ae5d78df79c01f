"""hvlaunch's directories in the user's cache on this host, and the running jobs that use their entries.

An entry is a directory with a file `lock`, whose time is the entry's last use. Its `users`, or those of its parts, has an
empty file for each agent with a job that uses the entry.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time

from hvlaunch.agent.facts import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

__all__ = ["check_own", "drop_old", "is_used", "own_directory", "own_use"]

_KEPT = 30 * 86400.0  # seconds for which an entry stays without being used
_FOREIGN_USE = 86400.0  # seconds for which another host's use of a shared directory counts


def own_directory(name: str) -> str:
    """Return the directory of this name. Raises PermissionError if other users can write there."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(cache, "hvlaunch", name)
    os.makedirs(path, 0o700, exist_ok=True)
    for directory in (os.path.dirname(path), path):
        check_own(directory)
    return path


def check_own(directory: str) -> None:
    """Check that nobody else can write there. Raises PermissionError."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("%s: other users can write there, or it is not yours" % directory)


def drop_old(directory: str, current: str, has_users: Callable[[str], bool]) -> None:
    """Remove entries that were not used for a month."""
    for name in os.listdir(directory):
        entry = os.path.join(directory, name)
        try:
            if name == current or os.stat(os.path.join(entry, "lock")).st_mtime > time.time() - _KEPT:
                continue
            with open(os.path.join(entry, "lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not has_users(entry):
                    shutil.rmtree(entry, ignore_errors=True)
        except OSError:
            continue


def _started(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; empty for no process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode("ascii")
    except OSError:
        return ""


def own_use() -> str:
    """Return the name of this agent's file in `users`; for an errand."""
    agent = os.getppid()
    return "%s_%d_%s" % ((boot_id() or "unknown"), agent, _started(agent))


def is_used(entry: str) -> bool:
    """True if another running job uses the entry."""
    try:
        users = os.listdir(os.path.join(entry, "users"))
    except OSError:
        return False
    boot = boot_id() or "unknown"
    has_users = False
    for user in users:
        path = os.path.join(entry, "users", user)
        if user == own_use():
            continue
        user_boot, pid, started = [*user.split("_"), "", ""][:3]
        if user_boot == boot:
            is_here = pid.isdigit() and started == _started(int(pid))
        else:
            # The user's home is shared with another host, whose processes are invisible here.
            is_here = os.stat(path).st_mtime > time.time() - _FOREIGN_USE
        if is_here:
            has_users = True
        else:
            os.unlink(path)
    return has_users
