"""Processors, memory, and limits of this host, as a process of the user has them."""

from __future__ import annotations

import os
import resource

from hvlaunch.agent.proc import (
    LEAST_ROOM,
    cgroup_memory,
    cgroup_words,
    commit_room,
    memory_of_host,
    read_text,
)
from hvlaunch.agent.wire.frames import number, or_null, plain, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

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
        "commit_room": _SIZE,
        "commit_least": _SIZE,  # for each worker
    }
)
_UNLIMITED = 1 << 62
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (it is measured, not written)


def read(arguments: Dict[str, Any], root: str = "") -> Dict[str, Any]:  # noqa: ARG001 (every part has them)
    """Return the part. `root` is the folder of /proc and /sys."""
    total, free = memory_of_host(root)
    available = free or 0
    limits = cgroup_memory(root)
    if limits is not None and limits[0] < total:
        total, available = limits[0], min(available, limits[1])
    try:
        shared = os.statvfs(_SHARED_MEMORY)
        room = commit_room(root).size
    except OSError:
        shared, room = None, 0
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
        "commit_room": room,
        "commit_least": LEAST_ROOM,
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
    limits = [words for words in cgroup_words("cpu", "cpu.max", root) if len(words) > 1]
    # Version 1 of cgroups has a file for each of both numbers.
    quotas = cgroup_words("cpu", "cpu.cfs_quota_us", root)
    periods = cgroup_words("cpu", "cpu.cfs_period_us", root)
    limits += [quota + period for quota, period in zip(quotas, periods) if quota and period]  # noqa: B905 (Python 3.10)
    numbers = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and int(period)]
    return round(min(numbers), 3) if numbers else None
