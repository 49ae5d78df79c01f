"""The collectives as functions that gradients flow through, by Horovod's names; what is begun here is waited for.

A gradient is the average over the workers, as the gradients of a loss that all of them average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from hvlaunch.torch import collectives
from hvlaunch.torch.current import ProcessSet, global_process_set
from hvlaunch.torch.reduction import Average, Compression, Compressor, Op, Sum, chosen

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
    """A new tensor: the average of all workers', or the result of `op` (Average, Sum, Min, Max, Product). Collective.

    tensor: of any shape, the same shape and type on all workers; averages of integers are cut off. Raises NotInitialized, and
    HorovodInternalError (a RuntimeError) where a worker is lost, as all functions here do.
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
    """As allreduce(), into the tensor itself, which it returns. No gradient goes through it. Collective.

    tensor: of any shape, the same shape and type on all workers. Raises as allreduce() does.
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
    """As allreduce(), of several tensors; a list. Collective.

    tensors: of any shapes and types, the same on all workers. Raises as allreduce() does.
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
    """As grouped_allreduce(), into the tensors themselves, which it returns. No gradient goes through it. Collective.

    tensors: of any shapes and types, the same on all workers. Raises as allreduce() does.
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return collectives.grouped_allreduce_async_(tensors, *how).wait()


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all workers behind each other, in order of rank; their first dimensions may differ. Collective.

    tensor: [rows, …], the same but for the rows on all workers. Returns [rows of all, …]. Raises NotInitialized, and ValueError, on all workers,
    where other dimensions or types differ.
    """
    del name
    result: torch.Tensor = _apply(_Allgather, tensor, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As allgather(), of several tensors; a list. Collective.

    tensors: each [rows, …], the same but for the rows on all workers. Raises as allgather() does.
    """
    return [allgather(tensor, name, process_set) for tensor in tensors]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A new tensor: that of the root (a global rank). Collective.

    tensor: of any shape, the same on all workers. Raises NotInitialized.
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
    """As broadcast(), into the tensor itself, which it returns. No gradient goes through it. Collective.

    tensor: of any shape, the same shape and type on all workers. Raises as broadcast() does.
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
    """What all workers have for this one, in order of rank; with `splits` (rows for each), also the rows from each. Collective.

    tensor: [rows, …]; without `splits` each worker gets as many of the rows. splits: [workers], whose sum is `rows`. Raises
    NotInitialized, and ValueError where the rows can't be divided so, and, on all workers, where the types of tensors differ.
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
    """The worker's rows of the average of all, or of their sum. Collective.

    tensor: [rows, …], the same shape on all workers; the first ones get one row more where the rows are no multiple of them.
    Raises NotInitialized.
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
    """As reducescatter(), of several tensors; a list. Collective.

    tensors: each [rows, …], the same shape and type on all workers. Raises as reducescatter() does.
    """
    how = name, compression, op, process_set, prescale_factor, postscale_factor
    return [reducescatter(tensor, *how) for tensor in tensors]
