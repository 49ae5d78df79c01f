"""The library for training scripts: `import hvlaunch.torch as hvt; hvt.init()`. docs/reference/torch.md is the guide.

The names are Horovod's, so its scripts continue with `import hvlaunch.torch as hvd`. The import also registers
`init_method="hvlaunch://"` with torch.
"""

from torch.nn import SyncBatchNorm

from hvlaunch.rendezvous.telling import progress
from hvlaunch.torch import elastic
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
)
from hvlaunch.torch.beginning import answer_stack_signal, init, shutdown
from hvlaunch.torch.collectives import (
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
    reducescatter_async,
    sparse_allreduce_async,
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
from hvlaunch.torch.group_errors import HorovodInternalError
from hvlaunch.torch.handles import Handle, poll, synchronize
from hvlaunch.torch.http_store import HTTPStore, register
from hvlaunch.torch.optimizer import DistributedOptimizer
from hvlaunch.torch.reduction import Adasum, Average, Compression, Max, Min, Product, Sum
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

# Both at import: a script may call torch's init_process_group() and never a function of this package.
register()
answer_stack_signal()
