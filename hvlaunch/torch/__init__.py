"""What a training script imports: `import hvlaunch.torch as hvt; hvt.init()`. docs/torch.md is the guide.

With it torch knows `init_method="hvlaunch://"`.
"""

from hvlaunch.torch.collectives import (
    allgather_object,
    allreduce,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvlaunch.torch.current import (
    cross_group,
    cross_rank,
    cross_size,
    device,
    init,
    is_initialized,
    local_group,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvlaunch.torch.http_store import HTTPStore
from hvlaunch.torch.scheme import register
from hvlaunch.torch.stack_signal import answer_stack_signal

__all__ = [
    "HTTPStore",
    "allgather_object",
    "allreduce",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_group",
    "cross_rank",
    "cross_size",
    "device",
    "init",
    "is_initialized",
    "local_group",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

register()
answer_stack_signal()
