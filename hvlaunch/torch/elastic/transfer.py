"""Sending a snapshot to the workers that lack it, at about the cost of one broadcast of its tensors.

Tensors travel as bytes: neither Gloo nor NCCL knows all of torch's dtypes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist

from hvlaunch.torch.elastic.snapshot import Snapshot
from hvlaunch.torch.skeleton import TensorSpec

__all__ = ["receive", "send"]

_BUCKET = 64 << 20
"""Bytes that are flattened together: enough to be as fast as one message, and little beside the model."""


def send(snapshot: Snapshot, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the snapshot to the others of the group, who call receive(). Collective.

    `device` is one that the group's backend takes tensors of.
    """
    root = dist.get_rank()
    specs = [TensorSpec.of(tensor) for tensor in snapshot.tensors]
    dist.broadcast_object_list([snapshot.skeleton, specs], root, group=group, device=device)
    for bucket in _buckets(snapshot.tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), root, group=group)


def receive(root: int, group: dist.ProcessGroup, device: torch.device) -> Snapshot:
    """What the worker of (global) rank `root` sends. Collective. Tensors come on the kind of device they had there."""
    parts: list[Any] = [None, None]
    dist.broadcast_object_list(parts, root, group=group, device=device)
    skeleton, specs = parts
    tensors = [spec.empty() for spec in specs]
    for bucket in _buckets(tensors):
        flat = torch.empty(sum(map(torch.numel, bucket)), dtype=bucket[0].dtype, device=device)
        dist.broadcast(flat.view(torch.uint8), root, group=group)
        for tensor, piece in zip(
            bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True
        ):
            tensor.copy_(piece.view(tensor.shape))
    return Snapshot(skeleton, tensors)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors of one dtype, the same on every worker; what has no element is not sent."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
