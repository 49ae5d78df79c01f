"""Reading /proc and /sys: files that are read again and again, processes of workers, limits of cgroups, and room for commits."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterable, Iterator, List, Optional, Tuple

__all__ = [
    "LEAST_ROOM",
    "ProcFile",
    "Room",
    "allow_many_files",
    "cgroup_memory",
    "cgroup_words",
    "command_of",
    "commit_room",
    "descendants",
    "memory_of_host",
    "parents",
    "read_text",
]

LEAST_ROOM = 64 << 20
"""Bytes of memory for the commits of a worker. Hardly a model fits into less."""
_READ = 1 << 16
_LONGEST = 200
_SHM = "/dev/shm"  # noqa: S108 (it is measured, not written)


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
    from hvlaunch.agent.quick import has_own_proc  # noqa: PLC0415 (workers import this module too, without that one)

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


def cgroup_words(controller: str, name: str, root: str = "") -> Iterator[List[str]]:
    """Yield the words of the file in this process's cgroup and in each ancestor, whose limits hold too. A missing file has no words.

    `name` is that of version 2 and version 1, separated by `|`. `root` is the folder of /proc and /sys.
    """
    new, _, old = name.partition("|")
    for line in (read_text(root + "/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        place = root + "/sys/fs/cgroup" + ("/" + controller if controllers else "")
        while True:
            file = "%s%s/%s" % (place, path.rstrip("/"), (old or new) if controllers else new)
            yield (read_text(file) or "").split()
            if path in ("", "/"):
                break
            path = os.path.dirname(path)


def cgroup_memory(root: str = "") -> Optional[Tuple[int, int]]:
    """Return the allowed and the free bytes of this process's cgroup and its ancestors; None without a limit."""
    limits, rooms = [], []
    files = [
        cgroup_words("memory", name, root)
        for name in (
            "memory.max|memory.limit_in_bytes",
            "memory.current|memory.usage_in_bytes",
            "memory.stat",
        )
    ]
    for limit, used, details in zip(*files):  # noqa: B905 (Python 3.10)
        if limit and limit[0].isdigit():
            limits.append(int(limit[0]))
            in_use = int(used[0]) - _cache(details) if used and used[0].isdigit() else 0
            rooms.append(limits[-1] - in_use)
    return (min(limits), max(0, min(rooms))) if limits else None


def _cache(words: List[str]) -> int:
    """Return the bytes of files in memory, which go first when memory is short: they are not in use."""
    for name in ("total_inactive_file", "inactive_file"):
        if name in words:
            return int(words[words.index(name) + 1])
    return 0


def memory_of_host(root: str = "") -> Tuple[int, Optional[int]]:
    """Return the host's memory and its free part in bytes. Sandboxes may lack either: 0, and None."""
    sizes = {}
    for line in (read_text(root + "/proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            sizes[words[0]] = int(words[1]) * 1024
    return sizes.get("MemTotal:", 0), sizes.get("MemAvailable:", sizes.get("MemFree:"))


class Room:
    """Memory for commits."""

    def __init__(self, size: int, place: str, remedy: str) -> None:
        self.size = size
        """Bytes: half of the free memory, since data loaders need /dev/shm too."""
        self.place = place
        """The scarcest of the places that a commit takes memory from."""
        self.remedy = remedy


def commit_room(root: str = "") -> Room:
    """Return the room for commits. tmpfs has its own limit, takes the memory of programs, and counts for the job's cgroup.

    Raises OSError without /dev/shm.
    """
    file_system = os.statvfs(_SHM)
    larger = "docker run --shm-size=SIZE, or mount -o remount,size=SIZE /dev/shm"
    fewer = "save(..., shared=True) if all ranks have equal values"
    rooms = [(file_system.f_bavail * file_system.f_frsize, _SHM, larger)]
    free = memory_of_host(root)[1]
    if free is not None:
        rooms.append((free, "the host's memory", fewer))
    limited = cgroup_memory(root)
    if limited is not None:
        remedy = "a higher limit (docker run --memory), or %s" % fewer
        rooms.append((limited[1], "the memory of the job's cgroup", remedy))
    size, place, remedy = min(rooms)
    return Room(size // 2, place, remedy)
