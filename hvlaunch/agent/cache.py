"""hvlaunch's directories in the user's cache on this host, and the running jobs that use their entries.

An entry is a directory with a file `lock`, and has one or more parts, or is its own only part. `users` in a part has a file for
each agent with a job in the part; `size`, if present, has the part's bytes.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time

from hvlaunch.agent.facts import boot_id

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, Optional, Sequence

__all__ = ["check_own", "drop_old", "is_used", "locked", "own_directory", "own_use"]

_KEPT = 30 * 86400.0  # seconds for which a part stays without being used
_MOST = 20 << 30  # bytes that the parts in a directory may have together
_FOREIGN_USE = (
    30 * 86400.0
)  # seconds for which another host's use of a shared directory counts, if no driver knows the job


def own_directory(name: str) -> str:
    """Return the directory of this name. Raises PermissionError if other users can write there."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(cache, "hvlaunch", name)
    for directory in (os.path.dirname(path), path):
        os.makedirs(directory, 0o700, exist_ok=True)
        check_own(directory)
    return path


def check_own(directory: str) -> None:
    """Check that no other user can write to a directory, or replace the directory. Raises PermissionError."""
    parent = os.path.dirname(directory)
    while parent != os.path.dirname(parent):
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError("%s: every user can write there" % parent)
        parent = os.path.dirname(parent)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("%s: other users can write there, or it is not yours" % directory)


def locked(entry: str, wait: Optional[Callable[[], None]] = None) -> _Lock:
    """Return the held lock of an entry; make a missing entry. `wait` is called again and again while another process has the lock.

    Raises PermissionError.
    """
    while True:
        os.makedirs(entry, 0o700, exist_ok=True)
        check_own(entry)
        try:
            lock = _Lock(entry, os.O_CREAT, fcntl.LOCK_NB if wait is not None else 0)
        except BlockingIOError:
            if wait is None:
                raise
            wait()
            continue
        if lock.is_valid:
            os.utime(os.path.join(entry, "lock"))
            return lock
        lock.close()


class _Lock:
    """An entry's lock, held until the end of a `with` block."""

    # No generator: contextlib imports functools and collections, 2 ms on each host.

    def __init__(self, entry: str, open_flags: int, lock_flags: int) -> None:
        """Take the lock. Raises OSError."""
        path = os.path.join(entry, "lock")
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | open_flags, 0o600)
        self.is_valid = False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | lock_flags)
            self.is_valid = os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except FileNotFoundError:
            pass  # the entry was removed meanwhile
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> _Lock:  # noqa: PYI034 (typing.Self is Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_old(directory: str, parts_of: Callable[[str], List[str]], most: int = _MOST) -> None:
    """Remove parts without use for a month, and the oldest parts while the directory has more than `most` bytes.

    Parts with a running job stay, as do entries with a held lock.
    """
    # Removing a part changes the times of its entry.
    entries = {
        path: _last_use(path) for path in (os.path.join(directory, name) for name in os.listdir(directory))
    }
    total, parts = 0, []
    for entry in entries:
        for part in parts_of(entry):
            size = _size(part)
            total += size
            parts.append((_last_use(part), size, part, entry))
    for last_use, size, part, entry in sorted(parts):
        if (last_use < time.time() - _KEPT or total > most) and _remove(entry, part):
            total -= size
    for entry, last_use in entries.items():
        if last_use < time.time() - _KEPT and os.path.isdir(entry) and not parts_of(entry):
            _remove(entry, entry)


def _remove(entry: str, part: str) -> bool:
    """Remove a part without a running job; return False if the part stays."""
    try:
        with _Lock(entry, 0, fcntl.LOCK_NB) as lock:
            if not lock.is_valid or is_used(part, counts_own=True):
                return False
            # First, because half of a part does not count.
            if os.path.exists(os.path.join(part, "complete")):
                os.unlink(os.path.join(part, "complete"))
            import shutil  # noqa: PLC0415 (takes 5 ms, and old parts are rare)

            shutil.rmtree(part)
    except OSError:
        return False  # the lock is held, or another errand removes the part
    return True


def _last_use(part: str) -> float:
    return max(map(_time, (part, os.path.join(part, "users"), os.path.join(part, "lock"))))


def _time(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _size(part: str) -> int:
    try:
        with open(os.path.join(part, "size")) as file:
            return int(file.read())
    except (OSError, ValueError):
        pass
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(part))
    except OSError:
        return 0


def _started(pid: int) -> str:
    """Return the start time of a process in the kernel's ticks; empty for no process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode("ascii")
    except OSError:
        return ""


def _machine() -> str:
    """Return a name for the visible processes of this kernel: a container has its own."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return (boot_id() or "unknown") + "".join(character for character in namespace if character.isdigit())


def own_use() -> str:
    """Return the name of this agent's file in `users`; for an errand."""
    agent = os.getppid()
    return "%s_%d_%s" % (_machine(), agent, _started(agent))


def is_used(
    part: str, *, counts_own: bool = False, job: str = "", jobs: Optional[Sequence[str]] = None
) -> bool:
    """True if a running job uses the part. This agent counts with `counts_own` alone, and `job` does not count.

    `jobs` are all running jobs with the right to use the part, if they are known.
    """
    try:
        users = os.listdir(os.path.join(part, "users"))
    except OSError:
        return False
    machine = _machine()
    has_users = False
    for user in users:
        path = os.path.join(part, "users", user)
        if user == own_use() and not counts_own:
            continue
        user_machine, pid, started = [*user.split("_"), "", ""][:3]
        if user_machine == machine:
            is_here = pid.isdigit() and started == _started(int(pid))
        # The user's home is shared with another host, whose processes are invisible here.
        elif jobs is not None and _read(path):
            is_here = _read(path) in jobs
        else:
            is_here = os.stat(path).st_mtime > time.time() - _FOREIGN_USE
        if not is_here:
            os.unlink(path)
        elif not job or _read(path) != job:
            has_users = True
    return has_users


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
