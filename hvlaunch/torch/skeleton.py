"""A value taken apart: a skeleton of plain objects, and the tensors in it, which are copied and sent as what they are."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TensorSpec", "join", "split"]


@dataclass(frozen=True, slots=True)
class _TensorRef:
    """Stands in a skeleton for a tensor: its index in the list."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How to make a tensor like another one, in another process."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    """The kind, without a number: each worker has its own."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Skeleton and tensors. Dicts, lists and tuples are looked through, everything else is kept as it is."""
    tensors: list[torch.Tensor] = []

    def take_out(node: Any) -> Any:
        if isinstance(node, torch.Tensor) and node.layout == torch.strided:
            tensors.append(node)
            return _TensorRef(len(tensors) - 1)
        return node

    return _rebuilt(value, take_out), tensors


def join(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that split() took apart, with these tensors. Nothing but the tensors is shared with the skeleton."""

    def put_back(node: Any) -> Any:
        return tensors[node.index] if isinstance(node, _TensorRef) else copy.deepcopy(node)

    return _rebuilt(skeleton, put_back)


def _rebuilt(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value in new containers, with what leaf() makes of all else. Containers that need more to be made are such leaves."""
    kind = type(node)
    if kind in (dict, OrderedDict):
        rebuilt = kind((key, _rebuilt(item, leaf)) for key, item in node.items())
        if kind is OrderedDict:
            rebuilt.__dict__.update(node.__dict__)  # a module's state_dict has its version there
        return rebuilt
    if kind in (list, tuple):
        return kind(_rebuilt(item, leaf) for item in node)
    return leaf(node)
