"""Objects and state that workers exchange."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from hvlaunch.torch.backends import as_failed
from hvlaunch.torch.current import ProcessSet, global_process_set, world

__all__ = [
    "TensorSpec",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
    "split",
]


@dataclass(frozen=True, slots=True)
class _TensorRef:
    """Placeholder of a tensor in a skeleton: its index in the list."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Recipe for an equal tensor in another process."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The device's kind without a number: each worker has its own device."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a value into a skeleton and its tensors. Dicts, lists and tuples are searched; everything else is kept."""
    tensors: list[torch.Tensor] = []

    def take_out(node: Any) -> Any:
        # Other layouts have no plain memory to broadcast: such tensors are pickled with the skeleton.
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            tensors.append(node)
            return _TensorRef(len(tensors) - 1)
        return node

    return _rebuilt(value, take_out), tensors


def join(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Join a skeleton with tensors. The result shares only the tensors with its sources."""

    def put_back(node: Any) -> Any:
        return tensors[node.index] if isinstance(node, _TensorRef) else copy.deepcopy(node)

    return _rebuilt(skeleton, put_back)


def _rebuilt(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy the value into new containers and apply leaf() elsewhere. A container that needs more arguments to be made is a leaf."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        rebuilt = kind((key, _rebuilt(item, leaf)) for key, item in node.items())
        if kind is OrderedDict:
            # A module's state_dict keeps its versions in an attribute.
            rebuilt.__dict__.update(node.__dict__)
        return rebuilt
    if kind in (list, tuple):
        return kind(_rebuilt(item, leaf) for item in node)
    return leaf(node)


T = TypeVar("T")
Parameters = nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]

_FLIGHT = 64
"""Number of broadcasts in progress at once."""


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of the root (a global rank) on every rank. Collective. Pickled: only for workers that trust each other."""
    del name
    held = [obj]
    with as_failed():
        dist.broadcast_object_list(held, root_rank, group=process_set.group, device=world().carrier)
    return held[0]


def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Return every rank's object, in order of rank. Collective. Pickled, like broadcast_object()."""
    del name
    objects: list[Any] = [None] * process_set.size()
    with as_failed():
        dist.all_gather_object(objects, obj, group=process_set.group)
    return objects


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Give every rank the root's parameters and buffers, in place. Collective.

    params: a module, a state_dict, or the result of parameters() or named_parameters(); equal on every rank except for the values.
    DistributedDataParallel does this by itself. Raises NotInitialized, and HorovodInternalError if a worker is lost.
    """
    _broadcast(_tensors_of(params), root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state, with learning rates and other settings. Collective.

    Optimizers of other ranks may be new, without a step. `model` exists for Horovod's scripts; hvlaunch ignores it.
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
    values = [item[1] if isinstance(item, tuple) else item for item in _items(params)]
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _items(params: Mapping[str, Any] | Iterable[Any]) -> Iterable[Any]:
    return params.items() if isinstance(params, Mapping) else params


def _broadcast(tensors: list[torch.Tensor], root_rank: int) -> None:
    """Broadcast tensors as bytes, since backends lack some number types; several at once, so small tensors cost little."""
    carrier = world().carrier
    for begin in range(0, len(tensors), _FLIGHT):
        targets = [tensor.detach() for tensor in tensors[begin : begin + _FLIGHT]]
        carried = [target.to(carrier).contiguous() for target in targets]
        with as_failed():
            for work in [dist.broadcast(_bytes(tensor), root_rank, async_op=True) for tensor in carried]:
                work.wait()
        for target, tensor in zip(targets, carried, strict=True):
            # Without a copy the backend has written into the target itself.
            if tensor.data_ptr() != target.data_ptr():
                target.copy_(tensor)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
