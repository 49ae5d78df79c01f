"""Operators of reductions and compression, by Horovod's names."""

from __future__ import annotations

import torch
from torch import distributed as dist

from hvlaunch.torch.group_errors import NotOffered

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "Max",
    "Min",
    "Op",
    "Product",
    "Sum",
    "carried",
    "chosen",
    "divided",
    "scaled",
]

Op = dist.ReduceOp.RedOpType

Average = dist.ReduceOp.AVG
"""The mean of all workers' tensors."""
Sum = dist.ReduceOp.SUM
"""Their sum."""
Min = dist.ReduceOp.MIN
"""The least of each element."""
Max = dist.ReduceOp.MAX
"""The greatest of each element."""
Product = dist.ReduceOp.PRODUCT
"""Their product."""

Adasum = "Adasum"
"""Horovod's; it is refused where it is to be used."""

_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}
"""Gloo and NCCL take none of these."""


def chosen(op: Op | str | None, average: bool | None = None) -> Op:
    """The operator, by its older name too. Raises ValueError where both are given, and NotOffered for Adasum."""
    if isinstance(op, str):
        raise NotOffered(op, "Average, and a learning rate for as many workers")
    if op is not None and average is not None:
        raise ValueError("either op or average can be given, not both")
    if op is not None:
        return op
    return Sum if average is False else Average


def carried(tensor: torch.Tensor, carrier: torch.device) -> torch.Tensor:
    """A copy of it on the backend's device, of a type that the backend takes."""
    return tensor.detach().to(carrier, _WIDER.get(tensor.dtype, tensor.dtype), copy=True).contiguous()


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor, times the factor; integers are cut off."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return (tensor.double() * factor).to(tensor.dtype)


def divided(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A sum of so many, as their average; integers are cut off."""
    whole = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
    return torch.div(tensor, size, rounding_mode=whole)


class Compressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """What is sent, and the type to come back to."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What has come, in its own type."""
        return tensor.to(dtype)


class _Half(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """How gradients are sent: `none`, as they are; `fp16`, floating-point numbers in 16 bits."""

    none = Compressor
    """Gradients are sent as they are."""
    fp16 = _Half
    """Floating-point numbers are sent in 16 bits (torch.float16), and come back in their own type; others are sent as they are."""
