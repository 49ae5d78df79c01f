"""What a state has saved: a copy that nothing else has a part of."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvlaunch.torch.skeleton import split

__all__ = ["Snapshot", "take"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A value as a skeleton and its tensors; see hvlaunch.torch.skeleton."""

    skeleton: Any
    tensors: Sequence[torch.Tensor]


def take(value: Any) -> Snapshot:
    """A copy of the value; tensors stay on their devices."""
    skeleton, tensors = split(value)
    return Snapshot(copy.deepcopy(skeleton), [tensor.detach().clone() for tensor in tensors])
