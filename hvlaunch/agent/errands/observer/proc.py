"""Reading /proc: files that are read again and again, and processes of workers."""

from __future__ import annotations

import os

from hvlaunch.agent.quick import has_own_proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Optional

__all__ = ["ProcFile", "allow_many_files", "command_of", "descendants", "parents", "read_text"]

_READ = 1 << 16
_LONGEST = 200


class ProcFile:
    """A file kept open after its first reading, since opening costs more than reading."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None

    def read(self) -> bytes:
        """Read all of it. Raises OSError: the file of a dead process stays dead, even if another process gets its pid."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY)
        # Reading from 0 makes the kernel produce the contents anew.
        data = os.pread(self._fd, _READ, 0)
        if len(data) < _READ:
            return data
        while True:
            more = os.pread(self._fd, _READ, len(data))
            if not more:
                return data
            data += more

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def allow_many_files() -> None:
    """Raise the limit of open files: two stay open for each process of the workers."""
    import resource  # noqa: PLC0415 (some builds of Python have none)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16
    soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        pass


def read_text(path: str) -> Optional[str]:
    """Read a file of /proc; None if it is unreadable or gone."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def parents() -> Dict[int, int]:
    """Map each process here to its parent. Processes that start or end meanwhile may be missing; all are, without a /proc of this namespace."""
    parent_by_pid = {}
    for name in os.listdir("/proc") if has_own_proc() else ():
        if name.isdigit():
            stat = read_text("/proc/%s/stat" % name)
            if stat is not None:
                parent_by_pid[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return parent_by_pid


def descendants(roots: Iterable[int], parent_by_pid: Dict[int, int]) -> Dict[int, List[int]]:
    """Map each root to itself and its descendants, nearest first, except the trees of other roots."""
    children: Dict[int, List[int]] = {}
    for pid, parent in parent_by_pid.items():
        children.setdefault(parent, []).append(pid)
    trees: Dict[int, List[int]] = {root: [root] for root in roots if root in parent_by_pid}
    for tree in trees.values():
        for pid in tree:
            tree.extend(child for child in sorted(children.get(pid, ())) if child not in trees)
    return trees


def command_of(pid: int) -> str:
    """Return the command line for people; the name for a process without arguments."""
    line = read_text("/proc/%d/cmdline" % pid) or ""
    words = line.replace("\0", " ").strip() or (read_text("/proc/%d/comm" % pid) or "?").strip()
    # A process chooses its command line: it must not control the terminal that shows it.
    plain = "".join(char if char.isprintable() else "?" for char in words)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."
