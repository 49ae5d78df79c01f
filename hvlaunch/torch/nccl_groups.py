"""Groups of NCCL's, whose collectives end by nothing but their communicators' end: kernels on the GPU wait for peers for ever."""

import threading
import time
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import distributed as dist

__all__ = ["Aborts", "Group", "abort_groups"]

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
    _aborts.end([group for group in list(dist.distributed_c10d._world.pg_map) if _is_of_nccl(group)])  # noqa: SLF001


def _ending(group: Group) -> threading.Thread:
    thread = threading.Thread(target=group.abort, name="hvlaunch abort", daemon=True)
    thread.start()
    return thread


def _is_of_nccl(group: dist.ProcessGroup) -> bool:
    try:
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001 (a group for all devices says no name)
    except RuntimeError:
        return False
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)
