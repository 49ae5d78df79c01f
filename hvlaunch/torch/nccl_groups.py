"""Groups of NCCL's, whose collectives end by nothing but their communicators' end: kernels on the GPU wait for peers for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import distributed as dist

__all__ = ["Aborts", "Group", "abort_groups", "has_timed_out"]

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
