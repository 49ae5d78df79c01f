"""Collectives on tensors, by Horovod's names, in torch's groups: their operators, compression, and handles of those in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import distributed as dist

from hvlaunch.torch.backends import as_failed
from hvlaunch.torch.collective_log import GAP, LoggedStep, Op, collective_log, note
from hvlaunch.torch.current import ProcessSet, global_process_set, world
from hvlaunch.torch.group_errors import CollectiveFailed, NotOffered

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "chosen",
    "gathered",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """A collective in progress, as functions ending in `_async` return it; `wait()` returns its result.

    Keep the handle until then. An in-place tensor gets its value through wait() or is_done(), or Horovod's synchronize() or poll().
    """

    def __init__(
        self,
        works: Iterable[dist.Work | None],
        finish: Callable[[], T],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish` makes the result after torch's works are done. `on_end` is called then if the end is known: a GPU may still be busy."""
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._on_end = on_end
        self._result: list[T] = []

    def is_done(self) -> bool:
        """Return True if wait() would not block. An in-place tensor then has its result."""
        if not all(work.is_completed() for work in self._works):
            return False
        # Wait() raises it again.
        with suppress(CollectiveFailed):
            self.wait()
        return True

    def wait(self) -> T:
        """Return the result, on every call. Raises HorovodInternalError, a RuntimeError, if a worker is lost."""
        if self._finish is not None:
            with as_failed():
                for work in self._works:
                    work.wait()
            if all(work.is_completed() for work in self._works):
                self._on_end()
            # Works hold the tensors' memory, which the script may want back before it drops the handle.
            self._works.clear()
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    def then(self, make: Callable[[T], U]) -> Handle[U]:
        """Return a handle whose result is made of this handle's result."""
        return Handle(self._works, lambda: make(self.wait()))


def _together(handles: Sequence[Handle[T]]) -> Handle[list[T]]:
    """Return one handle for several."""
    works = [work for handle in handles for work in handle._works]  # noqa: SLF001 (of the same class)
    return Handle(works, lambda: [handle.wait() for handle in handles])


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective and return its result. Raises HorovodInternalError, a RuntimeError, if a worker is lost."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return True if synchronize() would return at once; an in-place tensor then has its new value."""
    return handle.is_done()


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


def _carried(tensor: torch.Tensor, carrier: torch.device) -> torch.Tensor:
    """Copy the tensor to the backend's device, as a type that the backend accepts."""
    return tensor.detach().to(carrier, _WIDER.get(tensor.dtype, tensor.dtype), copy=True).contiguous()


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times the factor; integers are cut off."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return (tensor.double() * factor).to(tensor.dtype)


def _divided(tensor: torch.Tensor, size: int) -> torch.Tensor:
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


_TYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
"""Names of number types in one order; a job's workers have the same torch."""


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin a reduction: a new tensor with the average over the workers, or with the result of `op`. The factors multiply before and after.

    tensor: any shape; shape and type are equal on every worker and in the result; averages of integers are cut off. average is the
    older name of op: False is Sum. Returns a Handle whose result is the tensor.

    Raises NotInitialized, and ValueError for a set without this worker, or for both op and average.
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
    """Begin allreduce_async() in place: the result is the tensor itself.

    tensor: any shape; shape and type are equal on every worker. The new value is complete when poll() returns True or synchronize()
    returns. Raises like allreduce_async().
    """
    return _into(
        tensor, allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _into(tensor: torch.Tensor, handle: Handle[torch.Tensor]) -> Handle[torch.Tensor]:
    # Detached: autograd refuses to write into a leaf that requires gradients.
    return handle.then(tensor.detach().copy_).then(lambda _: tensor)


@as_failed()
def _reduced(
    tensor: torch.Tensor, op: Op, factors: tuple[float, float], process_set: ProcessSet
) -> Handle[torch.Tensor]:
    # A copy on the backend's device: the caller may change or free its tensor while the collective runs.
    result = _scaled(_carried(tensor, world().carrier), factors[0])
    ended = note(process_set, LoggedStep("allreduce", tensor.shape, tensor.dtype, op))
    work = dist.all_reduce(result, Sum if op == Average else op, process_set.group, async_op=True)
    device, dtype, size = tensor.device, tensor.dtype, process_set.size()

    def finish() -> torch.Tensor:
        reduced = _divided(result, size) if op == Average else result
        return _scaled(reduced, factors[1]).to(device, dtype)

    return Handle([work], finish, ended)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[torch.Tensor]:
    """Begin to gather: the workers' tensors one after the other, in order of rank. First dimensions may differ.

    tensor: [rows, ...], equal on every worker except for the rows; a tensor without dimensions is a row. Returns a Handle with the
    result [sum of rows, ...]. Raises NotInitialized, and ValueError on every worker if other dimensions or types differ.
    """
    del name
    return gathered(tensor, process_set)[0]


@as_failed()
def gathered(tensor: torch.Tensor, process_set: ProcessSet) -> tuple[Handle[torch.Tensor], int]:
    """Begin allgather_async(), and return also where this worker's rows begin."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    mine = _carried(rows, world().carrier)
    ended = note(process_set, LoggedStep("allgather", rows.shape, rows.dtype))
    # Backends gather equal shapes only, so the workers exchange shapes first and pad to the longest.
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
    received = [torch.empty_like(padded) for _ in shapes]
    work = dist.all_gather(received, padded, process_set.group, async_op=True)

    def finish() -> torch.Tensor:
        parts = [part[:count] for part, count in zip(received, counts, strict=True)]
        return torch.cat(parts).to(tensor.device, tensor.dtype)

    return Handle([work], finish, ended), sum(counts[: process_set.rank()])


def _shapes(tensor: torch.Tensor, process_set: ProcessSet) -> list[tuple[int, ...]]:
    """Gather the workers' shapes, in order of rank. Collective. Raises ValueError if their lengths or the tensors' types differ."""
    # The numbers of dimensions first: shapes of different lengths could not be gathered.
    kind = torch.tensor([tensor.dim(), _number(tensor.dtype)], device=world().carrier)
    counts, types = zip(*(pair.tolist() for pair in _all(kind, process_set)), strict=True)
    _check_types("allgather", types)
    if len(set(counts)) > 1:
        raise ValueError(f"tensors of {sorted(set(counts))} dimensions can't be put together")
    shape = torch.tensor(tensor.shape, dtype=torch.int64, device=world().carrier)
    return [tuple(sizes.tolist()) for sizes in _all(shape, process_set)]


def _all(tensor: torch.Tensor, process_set: ProcessSet) -> list[torch.Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(process_set.size())]
    dist.all_gather(tensors, tensor, process_set.group)
    return tensors


def _number(dtype: torch.dtype) -> int:
    """Return the number by which workers exchange the type."""
    return _TYPES.index(str(dtype))


def _check_types(collective: str, numbers: Sequence[int]) -> None:
    if len(set(numbers)) > 1:
        names = ", ".join(_TYPES[number].removeprefix("torch.") for number in sorted(set(numbers)))
        raise ValueError(f"{collective}: all tensors must be of one type, and are of {names}")


@as_failed()
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin a broadcast: a new tensor with the value of the root (a global rank).

    tensor: any shape; shape and type are equal on every worker. Returns a Handle whose result has the same shape. Raises
    NotInitialized, and ValueError for a set without this worker.
    """
    del name
    result = _carried(tensor, world().carrier)
    ended = note(process_set, LoggedStep("broadcast", tensor.shape, tensor.dtype, root_rank))
    work = dist.broadcast(result, root_rank, process_set.group, async_op=True)
    return Handle([work], lambda: result.to(tensor.device, tensor.dtype), ended)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[torch.Tensor]:
    """Begin broadcast_async() in place: the result is the tensor itself.

    tensor: any shape; shape and type are equal on every worker. The new value is complete when poll() returns True or synchronize()
    returns. Raises like broadcast_async().
    """
    return _into(tensor, broadcast_async(tensor, root_rank, name, process_set))


@as_failed()
def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[torch.Tensor, torch.Tensor]]:
    """Begin an exchange: the rows that each worker has for this one, in order of rank, and the number of rows from each.

    tensor: [rows, ...], equal on every worker except for the rows. splits: [workers], the number of rows for each, with the sum
    `rows`; without splits every worker gets an equal part. Returns a Handle with [received rows, ...] and [workers].

    Raises NotInitialized, ValueError if the rows can't be divided like this, and ValueError on every worker if types differ.
    """
    del name
    size = process_set.size()
    # First: a call that raises here must not be in the log.
    sent = _splits(tensor, splits, size)
    carrier = world().carrier
    ended = note(process_set, LoggedStep("alltoall", tensor.shape, tensor.dtype))
    received, rows = _rows_from_all(sent, tensor.dtype, process_set)
    mine = _carried(tensor, carrier)
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
    """Exchange the numbers of rows; return the numbers for this worker as a tensor and as a list. Collective.

    Raises ValueError if the tensors' types differ between any workers.
    """
    mine = torch.tensor([[rows, _number(dtype)] for rows in sent], device=world().carrier)
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine, group=process_set.group)
    _check_types("alltoall", received[:, 1].tolist())
    return received[:, 0], received[:, 0].tolist()


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
    """Begin a reduction whose rows are divided: this worker's rows of the average or Sum. The first ranks get a remainder's rows.

    tensor: [rows, ...]; shape and type are equal on every worker. Returns a Handle with [rows of this worker, ...].

    Raises NotInitialized, and ValueError for another operator or a tensor without rows.
    """
    del name
    op = chosen(op)
    if op not in (Average, Sum):
        raise ValueError("reducescatter: op is Average or Sum")
    if not tensor.dim():
        raise ValueError("reducescatter: a tensor of no dimensions has no rows")
    # Not every backend has reduce_scatter: every worker reduces everything and keeps its own rows.
    whole = _reduced(tensor, op, (prescale_factor, postscale_factor), process_set)
    begin, end = rows_of(tensor.shape[0], process_set)
    # A copy: a view would keep the rows of all workers in memory.
    return whole.then(lambda result: result[begin:end].clone())


def rows_of(rows: int, process_set: ProcessSet) -> tuple[int, int]:
    """Return the first of this worker's rows, and the end of its rows."""
    share, more = divmod(rows, process_set.size())
    rank = process_set.rank()
    begin = rank * share + min(rank, more)
    return begin, begin + share + (rank < more)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin allreduce_async() of several tensors, with a single Handle whose result is a list.

    tensors: any shapes and types, equal on every worker. Raises like allreduce_async().
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _together([allreduce_async(tensor, *how) for tensor in tensors])


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[torch.Tensor]]:
    """Begin grouped_allreduce_async() in place: the result are the tensors themselves.

    tensors: any shapes and types, equal on every worker. Raises like allreduce_async().
    """
    how = average, name, op, prescale_factor, postscale_factor, process_set
    return _together([allreduce_async_(tensor, *how) for tensor in tensors])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[torch.Tensor]]:
    """Begin allgather_async() of several tensors, with a single Handle whose result is a list.

    tensors: each [rows, ...], equal on every worker except for the rows. Raises like allgather_async().
    """
    return _together([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[torch.Tensor]]:
    """Begin reducescatter_async() of several tensors, with a single Handle whose result is a list.

    tensors: each [rows, ...]; shape and type are equal on every worker. Raises like reducescatter_async().
    """
    how = name, op, process_set, prescale_factor, postscale_factor
    return _together([reducescatter_async(tensor, *how) for tensor in tensors])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op | str = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin the average or Sum of sparse tensors. Returns a function that waits and returns the result, as in Horovod.

    tensor: made by torch.sparse_coo_tensor(), with shape and type equal on every worker and in the result. Every worker receives
    every worker's rows, and torch adds rows of the same index. Raises NotInitialized.
    """
    del name
    rows = tensor.coalesce()
    # Workers' tensors are joined along the first dimension, and torch keeps indices in columns.
    indices = allgather_async(rows.indices().T.contiguous(), None, process_set)
    # Both are on their way before either is awaited.
    values = allgather_async(rows.values(), None, process_set)
    size = process_set.size() if chosen(op) == Average else 1

    def finish() -> torch.Tensor:
        whole = torch.sparse_coo_tensor(indices.wait().T, values.wait() / size, tensor.shape)
        return whole.coalesce()

    return finish


@as_failed()
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every worker calls it. Collective. Raises NotInitialized, and HorovodInternalError if a worker is lost."""
    carrier = world().carrier
    ended = note(process_set, LoggedStep("barrier"))
    # Without the device's number NCCL guesses a GPU from the rank, which is wrong on hosts with other numbers
    # of slots.
    ids = None if carrier.index is None else [carrier.index]
    dist.barrier(process_set.group, device_ids=ids)
    ended()


def join(device: int = -1) -> int:
    """Wait until every worker has called it; return the rank that was last. Collective.

    Until then this worker takes part in collectives of hvlaunch.torch that its peers call for all workers: with zeros in reductions,
    with no rows in gathers. An average counts joined workers too. `device` exists for Horovod's scripts; hvlaunch ignores it.

    Raises RuntimeError if peers wait for this worker's broadcast or are too many collectives ahead.
    """
    del device
    place = world().place
    # A single worker has no peers to follow.
    return place.rank if place.size == 1 else collective_log().follow(_take_part)


def _take_part(step: LoggedStep) -> None:
    _PARTS[step.kind](step)


def _zeros(step: LoggedStep) -> torch.Tensor:
    return torch.zeros(step.shape, dtype=step.dtype)


def _no_rows(step: LoggedStep) -> torch.Tensor:
    return torch.zeros((0, *step.shape[1:]), dtype=step.dtype)


def _broadcast(step: LoggedStep) -> None:
    root = int(str(step.how))
    if root == world().place.rank:
        raise RuntimeError(f"rank {root} has joined, and others wait for its broadcast: call join() after it")
    broadcast_async(_zeros(step), root).wait()


def _gap(_: LoggedStep) -> None:
    raise RuntimeError("the others are too many collectives ahead of this worker, which has joined")


_PARTS: Mapping[str, Callable[[LoggedStep], object]] = {
    "allreduce": lambda step: allreduce_async(_zeros(step), op=Op.__members__[str(step.how)]).wait(),
    "allgather": lambda step: allgather_async(_no_rows(step)).wait(),
    "alltoall": lambda step: alltoall_async(_no_rows(step), [0] * world().place.size).wait(),
    "broadcast": _broadcast,
    GAP: _gap,
    "barrier": lambda _: barrier(),
}
