"""What scripts do with a group beside training in it: share objects, give all ranks the same start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from hvlaunch.torch.current import world
from hvlaunch.torch.elastic.interruptions import as_failed
from hvlaunch.torch.process_sets import ProcessSet, global_process_set
from hvlaunch.torch.skeleton import TensorSpec, join, split

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

T = TypeVar("T")
Parameters = nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]

_FLIGHT = 64
"""Broadcasts on their way at once."""


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The root's object (root is a global rank), on every rank. Collective. Pickled: only for workers that trust each other."""
    del name
    held = [obj]
    with as_failed():
        dist.broadcast_object_list(held, root_rank, group=process_set.group, device=world().carrier)
    return held[0]


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """The objects of all ranks, in order of rank. Collective. Pickled, as by broadcast_object."""
    del name
    found: list[Any] = [None] * process_set.size()
    with as_failed():
        dist.all_gather_object(found, obj, group=process_set.group)
    return found


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Give all ranks the root's parameters and buffers, in place. Collective.

    params: a module, a state_dict, or the result of parameters() or named_parameters(); the same on all ranks except for the values.
    DistributedDataParallel does this by itself. Raises NotInitialized, and HorovodInternalError where a worker is lost.
    """
    _broadcast(_tensors_of(params), root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: nn.Module | None = None
) -> None:
    """Give all ranks the root's optimizer state, with learning rates and other settings. Collective.

    The other ranks' optimizers may be new: they need not have made a step. `model` is Horovod's, and not needed.
    """
    del model
    is_root = world().place.rank == root_rank
    skeleton, tensors = split(optimizer.state_dict() if is_root else None)
    skeleton, specs = broadcast_object((skeleton, [TensorSpec.of(tensor) for tensor in tensors]), root_rank)
    if not is_root:
        tensors = [spec.empty() for spec in specs]
    _broadcast(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(join(skeleton, tensors))


def _tensors_of(params: Parameters) -> list[torch.Tensor]:
    if isinstance(params, nn.Module):
        return [*params.parameters(), *params.buffers()]
    found = [each[1] if isinstance(each, tuple) else each for each in _items(params)]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def _items(params: Mapping[str, Any] | Iterable[Any]) -> Iterable[Any]:
    return params.items() if isinstance(params, Mapping) else params


def _broadcast(tensors: list[torch.Tensor], root_rank: int) -> None:
    """Several at once, so that many small ones cost little more than one. As bytes: backends lack some types of numbers."""
    carrier = world().carrier
    for begin in range(0, len(tensors), _FLIGHT):
        targets = [tensor.detach() for tensor in tensors[begin : begin + _FLIGHT]]
        carried = [target.to(carrier).contiguous() for target in targets]
        with as_failed():
            for work in [dist.broadcast(_bytes(tensor), root_rank, async_op=True) for tensor in carried]:
                work.wait()
        for target, tensor in zip(targets, carried, strict=True):
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
