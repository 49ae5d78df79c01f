"""What scripts do with a group beside training in it: reduce a number, give all ranks the same start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from hvlaunch.torch.current import world
from hvlaunch.torch.skeleton import TensorSpec, join, split

__all__ = [
    "allgather_object",
    "allreduce",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

T = TypeVar("T")

_AVG = dist.ReduceOp.AVG
_FLIGHT = 64
"""Broadcasts on their way at once."""


def allreduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = _AVG, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A new tensor: the average over all ranks, or the result of op (a torch.distributed.ReduceOp). Collective.

    The tensor itself is not changed. group is a group of torch; the default is all workers. Gloo has no average, so it
    is the sum divided by the size; the average of integers is rounded down.
    """
    result = tensor.detach().to(world().carrier, copy=True).contiguous()
    dist.all_reduce(result, dist.ReduceOp.SUM if op == _AVG else op, group=group)
    if op == _AVG:
        whole = None if result.is_floating_point() or result.is_complex() else "floor"
        result = torch.div(result, dist.get_world_size(group), rounding_mode=whole)
    return result.to(tensor.device)


def broadcast_object(obj: T, root_rank: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """The root's object (root is a global rank), on every rank. Collective. Pickled: only for workers that trust each other."""
    held = [obj]
    dist.broadcast_object_list(held, root_rank, group=group, device=world().carrier)
    return held[0]


def allgather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The objects of all ranks, in order of rank. Collective. Pickled, as by broadcast_object."""
    world()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, obj, group=group)
    return found


def broadcast_parameters(
    model: nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0
) -> None:
    """Give all ranks the root's parameters and buffers, in place. Collective.

    model: a module, a state_dict, or the result of named_parameters(); the same on all ranks except for the values.
    DistributedDataParallel does this by itself.
    """
    _broadcast(_tensors_of(model), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the root's optimizer state, with learning rates and other settings. Collective.

    The other ranks' optimizers may be new: they need not have made a step.
    """
    is_root = world().place.rank == root_rank
    skeleton, tensors = split(optimizer.state_dict() if is_root else None)
    skeleton, specs = broadcast_object((skeleton, [TensorSpec.of(tensor) for tensor in tensors]), root_rank)
    if not is_root:
        tensors = [spec.empty() for spec in specs]
    _broadcast(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(join(skeleton, tensors))


def _tensors_of(
    model: nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
) -> list[torch.Tensor]:
    if isinstance(model, nn.Module):
        return [*model.parameters(), *model.buffers()]
    named = model.items() if isinstance(model, Mapping) else model
    return [tensor for _, tensor in named if isinstance(tensor, torch.Tensor)]


def _broadcast(tensors: list[torch.Tensor], root_rank: int) -> None:
    """Several at once, so that many small ones cost little more than one."""
    carrier = world().carrier
    for begin in range(0, len(tensors), _FLIGHT):
        targets = [tensor.detach() for tensor in tensors[begin : begin + _FLIGHT]]
        carried = [target.to(carrier).contiguous() for target in targets]
        for work in [dist.broadcast(tensor, root_rank, async_op=True) for tensor in carried]:
            work.wait()
        for target, tensor in zip(targets, carried, strict=True):
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor)
