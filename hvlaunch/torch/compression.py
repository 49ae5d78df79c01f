"""Smaller types for what is sent: the names are Horovod's."""

from __future__ import annotations

import torch

__all__ = ["Compression", "Compressor"]


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
