"""State as a skeleton of plain objects and a list of tensors, so that tensors are copied and sent as what they are."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Snapshot", "TensorSpec", "join", "split", "take"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's place in a skeleton: its index in the list, and how to make one like it."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The kind, without a number: each worker has its own."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was saved: nothing in it is shared with what it was taken of."""

    skeleton: Any
    tensors: Sequence[torch.Tensor]


def take(value: Any) -> Snapshot:
    """A copy of the value; tensors stay on their devices."""
    skeleton, tensors = split(value)
    return Snapshot(copy.deepcopy(skeleton), [tensor.detach().clone() for tensor in tensors])


def split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Skeleton and tensors. Dicts, lists and tuples are looked through, everything else is kept as it is."""
    tensors: list[torch.Tensor] = []

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            tensors.append(node)
            return TensorSpec(len(tensors) - 1, tuple(node.shape), node.dtype, node.device.type)
        return _rebuilt(node, walk)

    return walk(value), tensors


def join(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that split() took apart, with these tensors. Nothing but the tensors is shared with the skeleton."""

    def walk(node: Any) -> Any:
        if isinstance(node, TensorSpec):
            return tensors[node.index]
        rebuilt = _rebuilt(node, walk)
        return copy.deepcopy(node) if rebuilt is node else rebuilt

    return walk(skeleton)


def _rebuilt(node: Any, walk: Any) -> Any:
    """The container with its items walked; anything else as it is. Kinds that need more to be made are left alone."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        rebuilt = kind((key, walk(item)) for key, item in node.items())
        if kind is OrderedDict:
            rebuilt.__dict__.update(node.__dict__)  # a module's state_dict has its version there
        return rebuilt
    if kind in (list, tuple):
        return kind(walk(item) for item in node)
    return node
