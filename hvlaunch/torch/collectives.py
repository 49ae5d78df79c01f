"""Collectives on tensors, by Horovod's names and in torch's groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import distributed as dist

from hvlaunch.torch.collective_log import GAP, Step, collective_log, note
from hvlaunch.torch.current import ProcessSet, global_process_set, world
from hvlaunch.torch.group_errors import as_failed
from hvlaunch.torch.handles import Handle, together
from hvlaunch.torch.reduction import Average, Op, Sum, carried, chosen, divided, scaled

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
    "join",
    "reducescatter_async",
    "sparse_allreduce_async",
]


_TYPES = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})
"""The types of numbers by name: workers of one job have the same torch."""


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

    tensor: of any shape, the same shape and type on all workers, and so is the result; averages of integers are cut off. average is the
    older name of op: False is Sum. Returns a Handle, whose result is the tensor.

    Raises NotInitialized, and ValueError for a set that this worker is not in, and for both op and average.
    """
    del name
    return _reduced(tensor, chosen(op, average), (prescale_factor, postscale_factor), process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """As allreduce_async(), into the tensor itself, which is the result.

    tensor: of any shape, the same shape and type on all workers. It has its new value when poll() has told that it is there, or synchronize()
    has returned. Raises as allreduce_async() does.
    """
    return _into(
        tensor, allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _into(tensor: torch.Tensor, handle: Handle[torch.Tensor]) -> Handle[torch.Tensor]:
    return handle.then(tensor.detach().copy_).then(lambda _: tensor)


@as_failed()
def _reduced(
    tensor: torch.Tensor, op: Op, factors: tuple[float, float], process_set: ProcessSet
) -> Handle[torch.Tensor]:
    result = scaled(carried(tensor, world().carrier), factors[0])
    ended = note(process_set, Step("allreduce", tensor.shape, tensor.dtype, op))
    work = dist.all_reduce(result, Sum if op == Average else op, process_set.group, async_op=True)
    device, dtype, size = tensor.device, tensor.dtype, process_set.size()

    def finish() -> torch.Tensor:
        reduced = divided(result, size) if op == Average else result
        return scaled(reduced, factors[1]).to(device, dtype)

    return Handle([work], finish, ended)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Begin: the tensors of all workers behind each other, in order of rank. Their first dimensions may differ.

    tensor: [rows, …], the same but for the rows on all workers; one without dimensions is a row. Returns a Handle, whose result is
    [rows of all, …]. Raises NotInitialized, and ValueError, on all workers, where other dimensions or types differ.
    """
    del name
    return gathered(tensor, process_set)[0]


@as_failed()
def gathered(tensor: torch.Tensor, process_set: ProcessSet) -> tuple[Handle[torch.Tensor], int]:
    """As allgather_async(), and where this worker's rows begin."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    mine = carried(rows, world().carrier)
    ended = note(process_set, Step("allgather", rows.shape, rows.dtype))
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

    return Handle([work], finish, ended), sum(counts[: process_set.rank()])


def _shapes(tensor: torch.Tensor, process_set: ProcessSet) -> list[tuple[int, ...]]:
    """Those of all workers, in order of rank. Collective. Raises ValueError where their lengths differ, or the tensors' types."""
    kind = torch.tensor([tensor.dim(), _number(tensor.dtype)], device=world().carrier)
    counts, types = zip(*(one.tolist() for one in _all(kind, process_set)), strict=True)
    _check_types("allgather", types)
    if len(set(counts)) > 1:
        raise ValueError(f"tensors of {sorted(set(counts))} dimensions can't be put together")
    shape = torch.tensor(tensor.shape, dtype=torch.int64, device=world().carrier)
    return [tuple(one.tolist()) for one in _all(shape, process_set)]


def _all(tensor: torch.Tensor, process_set: ProcessSet) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(process_set.size())]
    dist.all_gather(found, tensor, process_set.group)
    return found


def _number(dtype: torch.dtype) -> int:
    """Under which workers tell each other of it."""
    return _TYPES.index(str(dtype))


def _check_types(what: str, numbers: Sequence[int]) -> None:
    if len(set(numbers)) > 1:
        names = ", ".join(_TYPES[number].removeprefix("torch.") for number in sorted(set(numbers)))
        raise ValueError(f"{what}: all tensors must be of one type, and are of {names}")


@as_failed()
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin: a new tensor, that of the root (a global rank).

    tensor: of any shape, the same shape and type on all workers. Returns a Handle, whose result is a tensor of that shape. Raises
    NotInitialized, and ValueError for a set that this worker is not in.
    """
    del name
    result = carried(tensor, world().carrier)
    ended = note(process_set, Step("broadcast", tensor.shape, tensor.dtype, root_rank))
    work = dist.broadcast(result, root_rank, process_set.group, async_op=True)
    return Handle([work], lambda: result.to(tensor.device, tensor.dtype), ended)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """As broadcast_async(), into the tensor itself, which is the result.

    tensor: of any shape, the same shape and type on all workers. It has its new value when poll() has told that it is there, or synchronize()
    has returned. Raises as broadcast_async() does.
    """
    return _into(tensor, broadcast_async(tensor, root_rank, name, process_set))


@as_failed()
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Begin: what all workers have for this one, in order of rank; and how many rows are from each.

    tensor: [rows, …], the same but for the rows on all workers. splits: [workers], how many rows go to each, whose sum is `rows`; without it
    all get as many. Returns a Handle, whose result is [rows from all, …] and [workers].

    Raises NotInitialized, and ValueError where the rows can't be divided so, and, on all workers, where the types of tensors differ.
    """
    del name
    size = process_set.size()
    sent = _splits(tensor, splits, size)
    carrier = world().carrier
    ended = note(process_set, Step("alltoall", tensor.shape, tensor.dtype))
    received, rows = _rows_from_all(sent, tensor.dtype, process_set)
    mine = carried(tensor, carrier)
    result = mine.new_empty((sum(rows), *mine.shape[1:]))
    work = dist.all_to_all_single(result, mine, rows, sent, process_set.group, async_op=True)
    return Handle(
        [work],
        lambda: (result.to(tensor.device, tensor.dtype), received.to(tensor.device, torch.int32)),
        ended,
    )


def _rows_from_all(
    sent: list[int], dtype: torch.dtype, process_set: ProcessSet
) -> tuple[torch.Tensor, list[int]]:
    """How many each has for this worker, twice. Collective. Raises ValueError where types of tensors differ between any workers."""
    mine = torch.tensor([[rows, _number(dtype)] for rows in sent], device=world().carrier)
    found = torch.empty_like(mine)
    dist.all_to_all_single(found, mine, group=process_set.group)
    _check_types("alltoall", found[:, 1].tolist())
    return found[:, 0], found[:, 0].tolist()


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

    tensor: [rows, …], the same shape and type on all workers. Returns a Handle, whose result is [rows of this worker, …].

    Raises NotInitialized, and ValueError for another operator, and for a tensor without rows.
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


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """As allreduce_async(), of several tensors: one Handle, whose result is a list.

    tensors: of any shapes and types, the same on all workers. Raises as allreduce_async() does.
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return together([allreduce_async(tensor, *how) for tensor in tensors])


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """As grouped_allreduce_async(), into the tensors themselves, which are the result.

    tensors: of any shapes and types, the same on all workers. Raises as allreduce_async() does.
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return together([allreduce_async_(tensor, *how) for tensor in tensors])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """As allgather_async(), of several tensors: one Handle, whose result is a list.

    tensors: each [rows, …], the same but for the rows on all workers. Raises as allgather_async() does.
    """
    return together([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """As reducescatter_async(), of several tensors: one Handle, whose result is a list.

    tensors: each [rows, …], the same shape and type on all workers. Raises as reducescatter_async() does.
    """
    how = name, op, process_set, prescale_factor, postscale_factor
    return together([reducescatter_async(tensor, *how) for tensor in tensors])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin: the average, or the Sum, of sparse tensors; what is returned is a function that waits for it, and gives it, as Horovod's.

    tensor: one of torch.sparse_coo_tensor(), of the same shape and type on all workers; so is the result. All workers get
    all rows of all, and torch adds those of the same index. Raises NotInitialized.
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


@as_failed()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers have come here. Collective. Raises NotInitialized, and HorovodInternalError where a worker is lost."""
    carrier = world().carrier
    ended = note(process_set, Step("barrier"))
    ids = None if carrier.index is None else [carrier.index]
    dist.barrier(process_set.group, device_ids=ids)
    ended()


def join(device: int = -1) -> int:
    """Wait until all workers have called it; the rank that did so last. Collective.

    Until then this worker takes part in the functions of hvlaunch.torch on tensors that the others call for all workers: with zeros where
    values are reduced, and with no rows where they are gathered. An average is over all workers, those that have joined too. `device` is
    Horovod's, and not needed.

    Raises RuntimeError where the others wait for a broadcast of this worker's, or are too far ahead.
    """
    del device
    place = world().place
    return place.rank if place.size == 1 else collective_log().follow(_take_part)


def _take_part(step: Step) -> None:
    _PARTS[step.kind](step)


def _zeros(step: Step) -> torch.Tensor:
    return torch.zeros(step.shape, dtype=step.dtype)


def _no_rows(step: Step) -> torch.Tensor:
    return torch.zeros((0, *step.shape[1:]), dtype=step.dtype)


def _broadcast(step: Step) -> None:
    root = int(str(step.how))
    if root == world().place.rank:
        raise RuntimeError(f"rank {root} has joined, and others wait for its broadcast: call join() after it")
    broadcast_async(_zeros(step), root).wait()


def _gap(_: Step) -> None:
    raise RuntimeError("the others are too many collectives ahead of this worker, which has joined")


_PARTS: Mapping[str, Callable[[Step], object]] = {
    "allreduce": lambda step: allreduce_async(_zeros(step), op=Op.__members__[str(step.how)]).wait(),
    "allgather": lambda step: allgather_async(_no_rows(step)).wait(),
    "alltoall": lambda step: alltoall_async(_no_rows(step), [0] * world().place.size).wait(),
    "broadcast": _broadcast,
    GAP: _gap,
    "barrier": lambda _: barrier(),
}
