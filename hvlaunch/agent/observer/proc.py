"""Reading /proc: files that are read again and again, and the processes of workers."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, List, Optional

__all__ = ["ProcFile", "allow_many_files", "command_of", "descendants", "parents", "read_text"]

_READ = 1 << 16
_LONGEST = 200


class ProcFile:
    """One file, from its first reading on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None

    def read(self) -> bytes:
        """All that it has now. Raises OSError: that of a process which is gone stays gone, whoever gets its number."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY)
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
    """Two are kept open for each process of the workers."""
    import resource  # noqa: PLC0415 (some builds of Python have none)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16
    soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        pass


def read_text(path: str) -> Optional[str]:
    """A file of /proc; None where it can't be read, or is no more."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def parents() -> Dict[int, int]:
    """The parent of each process here. What starts or ends meanwhile may be missing."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_text("/proc/%s/stat" % name)
            if stat is not None:
                found[int(name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(roots: Iterable[int], known: Dict[int, int]) -> Dict[int, List[int]]:
    """By root, it and all below it that are not below another root, the nearest first."""
    children: Dict[int, List[int]] = {}
    for pid, parent in known.items():
        children.setdefault(parent, []).append(pid)
    found: Dict[int, List[int]] = {root: [root] for root in roots if root in known}
    for tree in found.values():
        for pid in tree:
            tree.extend(child for child in sorted(children.get(pid, ())) if child not in found)
    return found


def command_of(pid: int) -> str:
    """What it runs, for people; of a process without arguments its name."""
    line = read_text("/proc/%d/cmdline" % pid) or ""
    words = line.replace("\0", " ").strip() or (read_text("/proc/%d/comm" % pid) or "?").strip()
    plain = "".join(char if char.isprintable() else "?" for char in words)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."
