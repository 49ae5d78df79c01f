"""Operators of reductions, and compression, by Horovod's names."""

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
"""The mean of the workers' tensors."""
Sum = dist.ReduceOp.SUM
"""The sum of the workers' tensors."""
Min = dist.ReduceOp.MIN
"""The least of each element."""
Max = dist.ReduceOp.MAX
"""The greatest of each element."""
Product = dist.ReduceOp.PRODUCT
"""The product of the workers' tensors."""

Adasum = "Adasum"
"""Horovod's operator; a function that receives it refuses."""

_WIDER = {torch.int16: torch.int32, torch.bool: torch.uint8}
"""Number types that neither Gloo nor NCCL accepts, with a type that both accept."""


def chosen(op: Op | str | None, average: bool | None = None) -> Op:
    """Return the operator, also by its older name. Raises ValueError for both names at once, and NotOffered for Adasum."""
    if isinstance(op, str):
        raise NotOffered(op, "Average, and a learning rate for as many workers")
    if op is not None and average is not None:
        raise ValueError("either op or average can be given, not both")
    if op is not None:
        return op
    return Sum if average is False else Average


def carried(tensor: torch.Tensor, carrier: torch.device) -> torch.Tensor:
    """Copy the tensor to the backend's device, as a type that the backend accepts."""
    return tensor.detach().to(carrier, _WIDER.get(tensor.dtype, tensor.dtype), copy=True).contiguous()


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times the factor; integers are cut off."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return (tensor.double() * factor).to(tensor.dtype)


def divided(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Divide a sum by the number of workers; integers are cut off."""
    whole = None if tensor.is_floating_point() or tensor.is_complex() else "trunc"
    return torch.div(tensor, size, rounding_mode=whole)


class Compressor:
    """Compression that leaves tensors alone."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send, and the type to restore."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the received tensor in its own type."""
        return tensor.to(dtype)


class _Half(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """Forms in which gradients travel: `none` leaves them alone, `fp16` sends floating-point numbers in 16 bits."""

    none = Compressor
    """Gradients travel as they are."""
    fp16 = _Half
    """Floating-point numbers travel as torch.float16 and return to their own type; other types are left alone."""
