"""Collectives as differentiable functions, by Horovod's names; each waits for its result.

A gradient is the average over the workers, like the gradient of a loss that the workers average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from hvlaunch.torch import collectives
from hvlaunch.torch.collective_log import Op
from hvlaunch.torch.collectives import Average, Compression, Compressor, Sum, chosen
from hvlaunch.torch.current import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def _apply(function: type[torch.autograd.Function], *words: Any) -> Any:
    return function.apply(*words)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = op, factors, process_set = how
        before, after = factors
        return collectives.allreduce_async(tensor, None, None, op, before, after, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, factors, process_set = ctx.how
        return _apply(_Allreduce, gradients[0], op, factors, process_set), None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
        handle, begin = collectives.gathered(tensor, process_set)
        ctx.shape, ctx.begin, ctx.process_set = tensor.shape, begin, process_set
        return handle.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = ctx.shape[0] if ctx.shape else 1
        mean = allreduce(gradients[0], process_set=ctx.process_set)
        return mean[ctx.begin : ctx.begin + rows].reshape(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, process_set: ProcessSet) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return collectives.broadcast_async(tensor, root_rank, None, process_set).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        process_set: ProcessSet = ctx.process_set
        mean = allreduce(gradients[0], process_set=process_set)
        is_root = process_set.ranks[process_set.rank()] == ctx.root_rank
        return mean if is_root else torch.zeros_like(mean), None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, received = collectives.alltoall_async(tensor, splits, None, process_set).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        result, _ = _apply(_Alltoall, gradients[0], ctx.received, ctx.process_set)
        return result, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = op, factors, process_set = how
        before, after = factors
        return collectives.reducescatter_async(tensor, None, op, process_set, before, after).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, factors, process_set = ctx.how
        size = process_set.size() if op == Sum else 1
        gradient = gradients[0] * (size * factors[0] * factors[1])
        return _apply(_Allgather, gradient, process_set), None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor: the average over the workers, or the result of `op` (Average, Sum, Min, Max, Product). Collective.

    tensor: any shape; shape and type are equal on every worker; averages of integers are cut off. Raises NotInitialized, and
    HorovodInternalError (a RuntimeError) if a worker is lost, like every function here.
    """
    del name
    small, dtype = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    result: torch.Tensor = _apply(_Allreduce, small, chosen(op, average), factors, process_set)
    return compression.decompress(result, dtype)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do allreduce() in place and return the tensor. No gradient flows through. Collective.

    tensor: any shape; shape and type are equal on every worker. Raises like allreduce().
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return collectives.allreduce_async_(tensor, *how).wait()


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the allreduce() of several tensors as a list. Collective.

    tensors: any shapes and types, equal on every worker. Raises like allreduce().
    """
    how = average, name, compression, op, prescale_factor, postscale_factor, process_set
    return [allreduce(tensor, *how) for tensor in tensors]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do grouped_allreduce() in place and return the tensors. No gradient flows through. Collective.

    tensors: any shapes and types, equal on every worker. Raises like allreduce().
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return collectives.grouped_allreduce_async_(tensors, *how).wait()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the workers' tensors one after the other, in order of rank; first dimensions may differ. Collective.

    tensor: [rows, ...], equal on every worker except for the rows. Returns [sum of rows, ...]. Raises NotInitialized, and ValueError
    on every worker if other dimensions or types differ.
    """
    del name
    result: torch.Tensor = _apply(_Allgather, tensor, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the allgather() of several tensors as a list. Collective.

    tensors: each [rows, ...], equal on every worker except for the rows. Raises like allgather().
    """
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor with the value of the root (a global rank). Collective.

    tensor: any shape, equal on every worker. Raises NotInitialized.
    """
    del name
    result: torch.Tensor = _apply(_Broadcast, tensor, root_rank, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do broadcast() in place and return the tensor. No gradient flows through. Collective.

    tensor: any shape; shape and type are equal on every worker. Raises like broadcast().
    """
    return collectives.broadcast_async_(tensor, root_rank, name, process_set).wait()


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that each worker has for this one, in order of rank; with `splits`, also the number of rows from each. Collective.

    tensor: [rows, ...]; without splits every worker gets an equal part. splits: [workers], with the sum `rows`.

    Raises NotInitialized, ValueError if the rows can't be divided like this, and ValueError on every worker if types differ.
    """
    del name
    result, received = _apply(_Alltoall, tensor, splits, process_set)
    return result if splits is None else (result, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this worker's rows of the average or Sum. Collective.

    tensor: [rows, ...], equal shapes on every worker; the first ranks get a remainder's rows. Raises NotInitialized.
    """
    del name
    small, dtype = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    result: torch.Tensor = _apply(_Reducescatter, small, chosen(op), factors, process_set)
    return compression.decompress(result, dtype)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the reducescatter() of several tensors as a list. Collective.

    tensors: each [rows, ...]; shape and type are equal on every worker. Raises like reducescatter().
    """
    how = name, compression, op, process_set, prescale_factor, postscale_factor
    return [reducescatter(tensor, *how) for tensor in tensors]
