"""torch's backends: their presence, and the care that Gloo's threads and NCCL's groups need before a process ends or continues."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed as dist

from hvlaunch.torch.group_errors import NotOffered

__all__ = [
    "Abortable",
    "Aborts",
    "abort_groups",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_backends",
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
    """Return False: collectives never use MPI."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return True if collectives use Gloo. Before init(): True if a plain init() would choose Gloo."""
    return not torch.cuda.is_available() if not dist.is_initialized() else dist.get_backend() == "gloo"


def gloo_built() -> bool:
    """Return True if torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return torch's version of NCCL, as 22105 for 2.21.5; 0 without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotOffered: torch's profiler writes such files."""
    del file_path, mark_cycles
    raise NotOffered("start_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


def stop_timeline() -> None:
    """Raise NotOffered, like start_timeline()."""
    raise NotOffered("stop_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


_NAME = "pt_gloo_runloop"
_LIMIT = 5.0
_TASKS = Path("/proc/self/task")


def wait_until_idle(
    *, tasks: Path = _TASKS, sleep: Callable[[float], object] = time.sleep, limit: float = _LIMIT
) -> bool:
    """Wait up to `limit` seconds until Gloo's threads are idle; return True if they are.

    Returns True at once without /proc. A thread that waits for Python's lock wakes in each switch interval of Python. A sleeping thread
    that did not wake over several intervals waits for work.
    """
    # Several intervals: a thread that waits for the lock wakes once in each and must be seen awake.
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
    """Return the number of voluntary sleeps of each of Gloo's threads, or None for a running one."""
    wakes: dict[str, int | None] = {}
    for task in tasks.glob("*/status"):
        try:
            lines = task.read_text().splitlines()
        # The thread has ended meanwhile.
        except OSError:
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _NAME:
            sleeps = status["State"].startswith("S")
            wakes[task.parent.name] = int(status["voluntary_ctxt_switches"]) if sleeps else None
    return wakes


_PATIENCE = 5.0


class Abortable(Protocol):
    """A group's backend, as far as aborting needs it. With torch 2.6 the group itself can't abort."""

    def abort(self) -> None:
        """Abort the backend's communicators."""


class Aborts:
    """Aborts groups by their backends, from any thread, each once. `patience` is the number of seconds that a call waits.

    Each gets a thread of its own: its communicator waits for the device, perhaps busy with another group's collective. torch's
    `_abort_process_group` aborts one group after the other, and removes the groups from torch's tables while another thread uses them.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._threads: dict[Abortable, threading.Thread] = {}

    def abort(self, backends: Iterable[Abortable]) -> None:
        """End every running collective of these backends now, and forget those of earlier calls."""
        # A second abort() of a backend would block behind the first, so its thread is kept.
        self._threads = {backend: self._threads.get(backend) or _ending(backend) for backend in backends}
        deadline = time.monotonic() + self._patience
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))


_aborts = Aborts()


def abort_groups() -> None:
    """End every running collective of this process on GPUs now. A repeated call takes groups made since.

    An aborted collective returns garbage to a waiting GPU; the next collective raises torch's DistBackendError.
    """
    _aborts.abort(gpu_backends())


def has_timed_out() -> bool:
    """Return True if a collective of this process on a GPU exceeded its timeout.

    torch's watchdog notices the timeout, and reports it since torch 2.7.
    """
    return any(_has_timed_out(backend) for backend in gpu_backends())


def _ending(backend: Abortable) -> threading.Thread:
    # A daemon: abort() may never return if the device hangs, and the process must still be able to end.
    thread = threading.Thread(target=backend.abort, name="hvlaunch abort", daemon=True)
    thread.start()
    return thread


def gpu_backends() -> list[Any]:
    """Return every group's backends for GPUs whose collectives end by abort(): NCCL's and XCCL's.

    A backend is known by its functions: torch's version and TORCH_DIST_USE_NCCL2 decide its class, and the classes have only the base
    class of every backend in common. Gloo takes tensors of GPUs too, and ends with its sockets.
    """
    # A copy, because another thread may make a group at this moment.
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
    # A group's name does not tell: a group may have one backend per device type.
    backends = [
        _unwrapped(group._get_backend(device))  # noqa: SLF001
        for group in groups
        for device in group._device_types  # noqa: SLF001
        if device.type != "cpu"
    ]
    return [
        backend for backend in backends if hasattr(backend, "abort") and backend.name() != dist.Backend.GLOO
    ]


def _unwrapped(backend: Any) -> Any:
    """Remove the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL. In torch 2.6 the wrapper has no abort()."""
    return getattr(backend, "wrapped_pg", backend)


def _has_timed_out(backend: Any) -> bool:
    if not hasattr(backend, "get_error"):
        return False
    # Every backend has the function since torch 2.14, and some raise.
    with contextlib.suppress(RuntimeError):
        return bool(backend.get_error().name == "TIMEOUT")
    return False
