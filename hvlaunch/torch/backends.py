"""torch's backends: what this torch has, and what Gloo's threads and NCCL's groups need before a process ends or goes on."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed as dist

from hvlaunch.torch.group_errors import NotOffered

__all__ = [
    "Aborts",
    "Group",
    "abort_groups",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "has_timed_out",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
    "wait_until_idle",
]


def mpi_enabled() -> bool:
    """Whether collectives go by MPI: never."""
    return False


def mpi_built() -> bool:
    """False, as MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """False, as MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Whether collectives go by Gloo. Before init(): whether they would, without an argument of its own."""
    return not torch.cuda.is_available() if not dist.is_initialized() else dist.get_backend() == "gloo"


def gloo_built() -> bool:
    """Whether torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """The version of NCCL that torch has, as 22105 for 2.21.5; 0 where it has none."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """False, as DDL is not used."""
    return False


def ccl_built() -> bool:
    """False, as oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether torch is one for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is one for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raises NotOffered: torch's profiler writes such files."""
    del file_path, mark_cycles
    raise NotOffered("start_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


def stop_timeline() -> None:
    """Raises NotOffered, as start_timeline()."""
    raise NotOffered("stop_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


_NAME = "pt_gloo_runloop"
_LIMIT = 5.0
_TASKS = Path("/proc/self/task")


def wait_until_idle(
    *, tasks: Path = _TASKS, sleep: Callable[[float], object] = time.sleep, limit: float = _LIMIT
) -> bool:
    """Wait until no thread of Gloo's is at work, `limit` seconds at most; whether it came to that.

    True at once where the kernel has no /proc. One that waits for Python's lock wakes in each of Python's switch
    intervals; so one that sleeps, and has not woken over some of them, waits for work.
    """
    pause = 4 * sys.getswitchinterval()
    before = None
    for _ in range(round(limit / pause)):
        now = _wakes(tasks)
        if not now or (now == before and None not in now.values()):
            return True
        before = now
        sleep(pause)
    return False


def _wakes(tasks: Path) -> dict[str, int | None]:
    """By thread, how often it has been put to sleep, or None while it runs."""
    found: dict[str, int | None] = {}
    for task in tasks.glob("*/status"):
        try:
            lines = task.read_text().splitlines()
        except OSError:  # a thread that ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _NAME:
            sleeps = status["State"].startswith("S")
            found[task.parent.name] = int(status["voluntary_ctxt_switches"]) if sleeps else None
    return found


_PATIENCE = 5.0


class Group(Protocol):
    """As torch's ProcessGroup."""

    def abort(self) -> None:
        """End its communicators."""


class Aborts:
    """Ends groups, from any thread, each once. `patience` is seconds for one call to wait for them.

    Each ends in a thread of its own: its communicator waits for the device, which may be busy with the collective of another.
    torch's own way (`_abort_process_group`) ends one after the other, and takes the groups out of torch's tables, under the feet
    of a thread that uses them.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._threads: dict[Group, threading.Thread] = {}

    def end(self, groups: Iterable[Group]) -> None:
        """Let every collective of these end now; of all others nothing is kept."""
        self._threads = {group: self._threads.get(group) or _ending(group) for group in groups}
        deadline = time.monotonic() + self._patience
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))


_aborts = Aborts()


def abort_groups() -> None:
    """Let every collective of this process' groups of NCCL end now; again: those of groups that came since.

    Who waits for one on the GPU goes on, and what it was to bring is garbage; who begins another gets torch's DistBackendError.
    """
    _aborts.end(_groups())


def has_timed_out() -> bool:
    """Whether a collective of this process' groups of NCCL took longer than its timeout.

    torch's watchdog notices, and from torch 2.7 on it tells.
    """
    return any(_has_timed_out(_backend(group)) for group in _groups())


def _ending(group: Group) -> threading.Thread:
    thread = threading.Thread(target=group.abort, name="hvlaunch abort", daemon=True)
    thread.start()
    return thread


def _groups() -> list[dist.ProcessGroup]:
    return [group for group in list(dist.distributed_c10d._world.pg_map) if _backend(group) is not None]  # noqa: SLF001


def _backend(group: dist.ProcessGroup) -> dist.ProcessGroupNCCL | None:
    """What it has for GPUs, where that is NCCL; the group's name does not say it, where it has one for processors too."""
    try:
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    except RuntimeError:
        return None
    return backend if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL) else None


def _has_timed_out(backend: dist.ProcessGroupNCCL | None) -> bool:
    return backend is not None and hasattr(backend, "get_error") and backend.get_error().name == "TIMEOUT"
