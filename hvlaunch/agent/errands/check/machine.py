"""Processors, memory, and limits of this host, as a process of the user has them."""

from __future__ import annotations

import os
import resource

from hvlaunch.agent.errands.observer.proc import read_text
from hvlaunch.agent.wire.shapes import number, or_null, plain, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional

__all__ = ["SHAPE", "read"]

_SIZE = whole(0, 1 << 62)
_WORDS = text(200)
SHAPE = record(
    {
        "processor": _WORDS,
        "architecture": _WORDS,
        "kernel": _WORDS,
        "cpus": whole(1, 1 << 20),  # that the process may run on
        "cpu_quota": or_null(number(0, 1 << 20)),  # processors that its cgroup may use
        "load": number(0, 1 << 40),
        "memory": _SIZE,  # of the host, or of the cgroup if it may use less
        "memory_available": _SIZE,
        "nofile": _SIZE,  # a worker's soft limits; 1 << 62 is unlimited
        "memlock": _SIZE,
        "shm": or_null(_SIZE),
        "shm_free": or_null(_SIZE),
    }
)
_UNLIMITED = 1 << 62
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (it is measured, not written)


def read(arguments: Dict[str, Any], root: str = "") -> Dict[str, Any]:  # noqa: ARG001 (every part has them)
    """Return the part. `root` is the folder of /proc and /sys."""
    meminfo = {}
    for line in (read_text(root + "/proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdigit():
            meminfo[words[0]] = int(words[1]) * 1024
    total = meminfo.get("MemTotal:", 0)
    available = meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0))
    limit = _cgroup_limit("memory", "memory.max", "memory.limit_in_bytes", root)
    if limit is not None and limit < total:
        used = (_cgroup_limit("memory", "memory.current", "memory.usage_in_bytes", root) or 0) - _cache(root)
        total, available = int(limit), int(min(available, max(0, limit - used)))
    try:
        shared = os.statvfs(_SHARED_MEMORY)
    except OSError:
        shared = None
    return {
        "processor": plain(_processor(root), 200),
        "architecture": plain(os.uname().machine, 200),
        "kernel": plain(os.uname().release, 200),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(root),
        "load": float((read_text(root + "/proc/loadavg") or "0").split()[0]),
        "memory": total,
        "memory_available": available,
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "shm": None if shared is None else shared.f_blocks * shared.f_frsize,
        "shm_free": None if shared is None else shared.f_bavail * shared.f_frsize,
    }


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, _UNLIMITED)


def _processor(root: str) -> str:
    text = read_text(root + "/proc/cpuinfo") or ""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return os.uname().machine


def _cpu_quota(root: str) -> Optional[float]:
    """Return the processors that the narrowest cgroup may use; None without a limit."""
    limits = [words for words in _cgroup_words("cpu", "cpu.max", root) if len(words) > 1]
    # Version 1 of cgroups has a file for each of both numbers.
    quotas = _cgroup_words("cpu", "cpu.cfs_quota_us", root)
    periods = _cgroup_words("cpu", "cpu.cfs_period_us", root)
    limits += [[quota[0], period[0]] for quota, period in zip(quotas, periods)]  # noqa: B905 (Python 3.10)
    numbers = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and int(period)]
    return round(min(numbers), 3) if numbers else None


def _cgroup_limit(controller: str, new: str, old: str, root: str = "") -> Optional[float]:
    """Return the lowest number in a file of this process's cgroup and its ancestors; None without a limit."""
    files = [*_cgroup_words(controller, new, root), *_cgroup_words(controller, old, root)]
    numbers = [int(words[0]) for words in files if words and words[0].isdigit()]
    return min(numbers) if numbers else None


def _cache(root: str) -> int:
    """Return the bytes of files in memory, which go first when memory is short: they are not in use."""
    words = next(_cgroup_words("memory", "memory.stat", root), [])
    for name in ("total_inactive_file", "inactive_file"):
        if name in words:
            return int(words[words.index(name) + 1])
    return 0


def _cgroup_words(controller: str, name: str, root: str) -> Iterator[List[str]]:
    """Yield the words of the file in this process's cgroup and its ancestors: all their limits hold."""
    for line in (read_text(root + "/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        place = root + "/sys/fs/cgroup" + ("/" + controller if controllers else "")
        while True:
            words = (read_text("%s%s/%s" % (place, path.rstrip("/"), name)) or "").split()
            if words:
                yield words
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
