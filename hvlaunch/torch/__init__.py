"""The library for training scripts: `import hvlaunch.torch as hvt; hvt.init()`. docs/reference/torch.md is the guide.

The names are Horovod's, so its scripts continue with `import hvlaunch.torch as hvd`. The import also registers
`init_method="hvlaunch://"` with torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, TextIO

from torch.nn import SyncBatchNorm

from hvlaunch.rendezvous.worker import progress
from hvlaunch.torch import current, elastic
from hvlaunch.torch.backends import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
    wait_until_idle,
)
from hvlaunch.torch.collectives import (
    Adasum,
    Average,
    Compression,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hvlaunch.torch.current import (
    ProcessSet,
    add_process_set,
    cross_group,
    cross_rank,
    cross_size,
    device,
    global_process_set,
    is_initialized,
    local_group,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
)
from hvlaunch.torch.differentiable import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from hvlaunch.torch.elastic.training import is_elastic, placed
from hvlaunch.torch.group_errors import HorovodInternalError, NotOffered
from hvlaunch.torch.http_store import HTTPStore, register
from hvlaunch.torch.optimizer import DistributedOptimizer
from hvlaunch.torch.sharing import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HTTPStore",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_group",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "device",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_group",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "progress",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_files: list[TextIO] = []
"""Kept open for faulthandler, which writes to their descriptors."""

STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


def answer_stack_signal() -> None:
    """Let the host's agent request stacks from this process, if it is a worker and does not use the signal otherwise."""
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    if scratch is None or STACK_SIGNAL is None or _files or signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return
    # The directory is gone, or is another program's.
    with suppress(OSError, ValueError):
        # One file per process, opened in advance: a signal handler must not open files.
        path = os.path.join(scratch, f"stack.{os.getpid()}")  # noqa: PTH118 (as cheap as can be)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file, all_threads=True, chain=False)
        _files.append(file)


def init(
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    *,
    comm: object = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
) -> None:
    """Make this process a member of the group of all workers, and choose its device. Collective.

    backend: a backend's name in torch; the default is NCCL with CUDA, else Gloo. timeout: the longest wait for the other
    workers, and for each later collective, as a timedelta or in seconds; the default is torch's. process_sets: sets to add at
    once; more can be added later. comm exists for Horovod's scripts and must be empty.

    The rank comes from the launcher's variables (hvlaunch, torchrun, mpirun or srun). Without a launcher the group has a
    single process. Under hvlaunch the workers find rank 0 through the rendezvous, else at MASTER_ADDR and MASTER_PORT. In an
    elastic job of hvlaunch, init() asks for a place in the next round, and a function under elastic.run continues from there.
    A second call does nothing until shutdown().

    Raises GroupError (see hvlaunch.torch.group_errors), and RendezvousError if the rendezvous can't be reached. A worker that
    an elastic job does not need any more ends by SystemExit(0).
    """
    if comm or not isinstance(backend, str | None):
        raise NotOffered(
            "init(comm)", "add_process_set() with the ranks, and process_set= in each collective"
        )
    if current.is_initialized():
        return
    if not isinstance(timeout, timedelta | None):
        timeout = timedelta(seconds=timeout)
    if is_elastic():
        with placed() as training:
            training.join(backend=backend, timeout=timeout)
    else:
        current.init(backend, timeout)
    # init() may be called again after shutdown(), and one registration is enough.
    atexit.unregister(_end)
    atexit.register(_end, os.getpid())
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Wait until all workers call it, then leave the group. Collective. init() may follow. Does nothing without a group.

    A failing worker need not call it: its peers do not wait for a worker that has ended.
    """
    if is_elastic():
        with placed() as training:
            training.leave()
    else:
        current.shutdown()


def _end(process: int) -> None:
    """Leave the group at the end of Python: Horovod's scripts call no shutdown(). Does not wait for peers, which may have failed."""
    # A forked child inherits this registration, and has no part in the group.
    if current.is_initialized() and os.getpid() == process:
        wait_until_idle()
        current.leave()


# Both at import: a script may call torch's init_process_group() and never a function of this package.
register()
answer_stack_signal()
