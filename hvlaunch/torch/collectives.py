"""Collectives on tensors, by Horovod's names. Each is begun by a function that ends with `_async`, whose handle has the result.

As everywhere in torch, all workers begin the same collectives in the same order; names are taken, and not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import distributed as dist

from hvlaunch.torch.current import world
from hvlaunch.torch.handles import Handle
from hvlaunch.torch.process_sets import ProcessSet, global_process_set
from hvlaunch.torch.reduction import Average, Op, Sum, carried, chosen, divided, scaled
from hvlaunch.torch.trail import Step, note
from hvlaunch.torch.variants import grouped, in_place

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "gathered",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin: a new tensor, the average of all workers' or the result of `op`; each is multiplied by the factors before and after.

    Averages of integers are cut off. Raises NotInitialized, and ValueError for a set that this worker is not in.
    """
    del name
    return _reduced(tensor, chosen(op, average), (prescale_factor, postscale_factor), process_set)


allreduce_async_ = in_place(allreduce_async)
"""As allreduce_async(), into the tensor itself."""


def _reduced(
    tensor: torch.Tensor, op: Op, factors: tuple[float, float], process_set: ProcessSet
) -> Handle[torch.Tensor]:
    result = scaled(carried(tensor, world().carrier), factors[0])
    note(process_set, Step("allreduce", tensor.shape, tensor.dtype, op))
    work = dist.all_reduce(result, Sum if op == Average else op, process_set.group, async_op=True)

    def finish() -> torch.Tensor:
        reduced = divided(result, process_set.size()) if op == Average else result
        return scaled(reduced, factors[1]).to(tensor.device, tensor.dtype)

    return Handle([work], finish)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Begin: the tensors of all workers behind each other, in order of rank. Their first dimensions may differ.

    Raises ValueError where the others do.
    """
    del name
    return gathered(tensor, process_set)[0]


def gathered(tensor: torch.Tensor, process_set: ProcessSet) -> tuple[Handle[torch.Tensor], int]:
    """As allgather_async(), and where this worker's rows begin."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    mine = carried(rows, world().carrier)
    note(process_set, Step("allgather", rows.shape, rows.dtype))
    shapes = _shapes(rows, process_set)
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(
            f"allgather: all dimensions but the first must be alike, and are {sorted(set(shapes))}"
        )
    counts = [shape[0] for shape in shapes]
    padded = mine
    if mine.shape[0] < max(counts):
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
    found = [torch.empty_like(padded) for _ in shapes]
    work = dist.all_gather(found, padded, process_set.group, async_op=True)

    def finish() -> torch.Tensor:
        parts = [part[:count] for part, count in zip(found, counts, strict=True)]
        return torch.cat(parts).to(tensor.device, tensor.dtype)

    return Handle([work], finish), sum(counts[: process_set.rank()])


def _shapes(tensor: torch.Tensor, process_set: ProcessSet) -> list[tuple[int, ...]]:
    """Those of all workers, in order of rank. Collective. Raises ValueError where their lengths differ."""
    count = torch.tensor([tensor.dim()], device=world().carrier)
    counts = _all(count, process_set)
    if len({int(one) for one in counts}) > 1:
        raise ValueError(
            f"tensors of {sorted({int(one) for one in counts})} dimensions can't be put together"
        )
    shape = torch.tensor(tensor.shape, dtype=torch.int64, device=world().carrier)
    return [tuple(one.tolist()) for one in _all(shape, process_set)]


def _all(tensor: torch.Tensor, process_set: ProcessSet) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(process_set.size())]
    dist.all_gather(found, tensor, process_set.group)
    return found


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin: a new tensor, that of the root (a global rank)."""
    del name
    result = carried(tensor, world().carrier)
    note(process_set, Step("broadcast", tensor.shape, tensor.dtype, root_rank))
    work = dist.broadcast(result, root_rank, process_set.group, async_op=True)
    return Handle([work], lambda: result.to(tensor.device, tensor.dtype))


broadcast_async_ = in_place(broadcast_async)
"""As broadcast_async(), into the tensor itself."""


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Begin: what all workers have for this one, in order of rank; and how many rows are from each.

    `splits` is how many rows go to each worker; without it all get as many. Raises ValueError where they are not those of the tensor.
    """
    del name
    size = process_set.size()
    sent = _splits(tensor, splits, size)
    carrier = world().carrier
    counts = torch.tensor(sent, dtype=torch.int64, device=carrier)
    received = torch.empty_like(counts)
    note(process_set, Step("alltoall", tensor.shape, tensor.dtype))
    dist.all_to_all_single(received, counts, group=process_set.group)
    rows = received.tolist()
    mine = carried(tensor, carrier)
    result = mine.new_empty((sum(rows), *mine.shape[1:]))
    work = dist.all_to_all_single(result, mine, rows, sent, process_set.group, async_op=True)
    return Handle(
        [work], lambda: (result.to(tensor.device, tensor.dtype), received.to(tensor.device, torch.int32))
    )


def _splits(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall: {rows} rows can't be divided among {size} workers: give splits")
        return [rows // size] * size
    sent = [int(count) for count in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    if len(sent) != size or sum(sent) != rows or min(sent) < 0:
        raise ValueError(f"alltoall: splits {sent} are not {size} numbers whose sum is {rows}")
    return sent


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[torch.Tensor]:
    """Begin: this worker's rows of the average of all, or of their sum. The first ranks have one row more where there is a rest.

    Raises ValueError for another operator, and for a tensor without rows.
    """
    del name
    op = chosen(op)
    if op not in (Average, Sum):
        raise ValueError("reducescatter: op is Average or Sum")
    if not tensor.dim():
        raise ValueError("reducescatter: a tensor of no dimensions has no rows")
    whole = _reduced(tensor, op, (prescale_factor, postscale_factor), process_set)
    begin, end = rows_of(tensor.shape[0], process_set)
    return whole.then(lambda result: result[begin:end].clone())


def rows_of(rows: int, process_set: ProcessSet) -> tuple[int, int]:
    """The first of this worker's rows, and the one behind its last."""
    each, more = divmod(rows, process_set.size())
    rank = process_set.rank()
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


grouped_allreduce_async = grouped(allreduce_async)
"""As allreduce_async(), of a list of tensors: one Handle, whose result is a list."""
grouped_allreduce_async_ = grouped(allreduce_async_)
"""As grouped_allreduce_async(), into the tensors themselves."""
grouped_allgather_async = grouped(allgather_async)
"""As allgather_async(), of a list of tensors: one Handle, whose result is a list."""
grouped_reducescatter_async = grouped(reducescatter_async)
"""As reducescatter_async(), of a list of tensors: one Handle, whose result is a list."""


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin: the average, or the Sum, of sparse tensors; what is returned waits for it, and gives it.

    All workers get all rows of all, and torch adds those of the same index.
    """
    del name
    rows = tensor.coalesce()
    indices = allgather_async(rows.indices().T.contiguous(), None, process_set)
    values = allgather_async(rows.values(), None, process_set)
    size = process_set.size() if chosen(op) == Average else 1

    def finish() -> torch.Tensor:
        whole = torch.sparse_coo_tensor(indices.wait().T, values.wait() / size, tensor.shape)
        return whole.coalesce()

    return finish


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers have come here. Collective."""
    carrier = world().carrier
    note(process_set, Step("barrier"))
    ids = None if carrier.index is None else [carrier.index]
    dist.barrier(process_set.group, device_ids=ids)
