"""The same collectives on the same inputs by Horovod and by hvlaunch.torch: what each rank gets.

This writes what Horovod's workers got (docs/reference/horovod.md says how to build it, in a Python that has hvlaunch besides); test_as_horovod.py compares:

    hvlaunch --horovod -np 3 -x HOROVOD_DYNAMIC_PROCESS_SETS=1 python tests/unit/torch/horovod_cases.py tests/unit/torch/horovod_results.json
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

__all__ = ["DTYPES", "SIZE", "found", "same"]

SIZE = 3
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
REDUCTIONS = ("Sum", "Average", "Min", "Max", "Product")


def values(rank: int, dtype: str, rows: int = 3) -> torch.Tensor:
    """Small whole numbers: their sums and products are exact in each type."""
    numbers = [(3 * row + 5 * column + 2 * rank) % 6 for row in range(rows) for column in range(2)]
    return torch.tensor(numbers).reshape(rows, 2).to(getattr(torch, dtype))


def of_dtype(hvd: Any, rank: int, dtype: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    mine = values(rank, dtype)
    for op in REDUCTIONS:
        yield f"allreduce {op}", partial(hvd.allreduce, mine, name=f"{op} {dtype}", op=getattr(hvd, op))
    yield (
        "allreduce scaled",
        lambda: hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
    )
    yield "allreduce_", lambda: hvd.allreduce_(mine.clone(), op=hvd.Sum)
    yield "grouped_allreduce", lambda: hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum)
    yield "allgather", lambda: hvd.allgather(values(rank, dtype, rank + 1))
    yield "grouped_allgather", lambda: hvd.grouped_allgather([mine, values(rank, dtype, 3 - rank)])
    yield "broadcast", lambda: hvd.broadcast(mine, root_rank=1)
    yield "broadcast_", lambda: hvd.broadcast_(mine.clone(), root_rank=2)
    yield "alltoall", lambda: hvd.alltoall(mine)
    splits = torch.tensor([[2, 1, 0], [0, 3, 0], [1, 1, 1]][rank], dtype=torch.int32)
    yield "alltoall splits", lambda: list(hvd.alltoall(mine, splits=splits))
    for op in ("Sum", "Average"):
        rows = values(rank, dtype, 4)
        yield f"reducescatter {op}", partial(hvd.reducescatter, rows, op=getattr(hvd, op))
    yield "grouped_reducescatter", lambda: hvd.grouped_reducescatter([mine, mine[:2]], op=hvd.Sum)


def gradient(rank: int, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    tensor = values(rank, "float64").requires_grad_()
    result = function(tensor)
    (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    return tensor.grad


def of_no_dtype(hvd: Any, rank: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for op in ("Sum", "Average"):
        for name in ("allreduce", "reducescatter"):
            function = partial(getattr(hvd, name), op=getattr(hvd, op))
            yield f"gradient of {name} {op}", partial(gradient, rank, function)
    yield "gradient of allgather", lambda: gradient(rank, hvd.allgather)
    yield "gradient of broadcast", lambda: gradient(rank, lambda x: hvd.broadcast(x, root_rank=1))
    yield "gradient of alltoall", lambda: gradient(rank, hvd.alltoall)
    third = torch.full((4,), 1 / 3)
    yield "fp16 allreduce", lambda: hvd.allreduce(third * (rank + 1), compression=hvd.Compression.fp16)
    yield "broadcast_object", lambda: hvd.broadcast_object({"rank": rank}, root_rank=2)["rank"]
    yield "allgather_object", lambda: hvd.allgather_object(rank)
    yield "sparse_allreduce_async", lambda: sparse(hvd, rank)
    yield "process set", lambda: in_set(hvd, rank)
    yield "join", lambda: joined(hvd, rank)


def sparse(hvd: Any, rank: int) -> torch.Tensor:
    rows = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, 2.0]), (4,))
    result: torch.Tensor = hvd.sparse_allreduce_async(rows, name="rows", op=hvd.Average)().to_dense()
    return result


def in_set(hvd: Any, rank: int) -> list[Any]:
    ends = hvd.add_process_set([0, 2])
    result = [ends.included(), ends.size(), ends.ranks]
    if rank != 1:
        mine = values(rank, "float32")
        result += [ends.rank(), plain(hvd.allreduce(mine, op=hvd.Average, process_set=ends))]
        result.append(plain(hvd.allgather(mine, process_set=ends)))
        result.append(plain(hvd.broadcast(mine, 2, process_set=ends)))
    hvd.barrier()
    result.append(hvd.remove_process_set(ends))
    return result


def joined(hvd: Any, rank: int) -> list[Any]:
    """Rank r has r + 1 batches, so rank 2 is the last."""
    result = []
    for batch in range(rank + 1):
        for op in REDUCTIONS:
            name = f"joined {batch} {op}"
            result.append(plain(hvd.allreduce(values(rank, "float64"), name=name, op=getattr(hvd, op))))
    return [*result, hvd.join()]


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def found(hvd: Any, rank: int) -> dict[str, Any]:
    """The result of each case by name; None if it does not exist."""
    cases = [(f"{dtype} {name}", case) for dtype in DTYPES for name, case in of_dtype(hvd, rank, dtype)]
    results: dict[str, Any] = {}
    for name, case in [*cases, *of_no_dtype(hvd, rank)]:
        try:
            results[name] = plain(case())
        except (ValueError, RuntimeError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            results[name] = None
    return results


def same(ours: Any, theirs: Any) -> bool:
    """True for equal types and values, floats within 1e-7."""
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float):
        return type(ours) is float and math.isclose(ours, theirs, rel_tol=1e-7, abs_tol=1e-12)
    return bool(ours == theirs) and type(ours) is type(theirs)


def parameters(module: Any, names: list[str]) -> dict[str, list[str] | None]:
    """The parameters of each callable; None for others, and for errors."""
    named = {name: getattr(module, name) for name in names if not inspect.ismodule(getattr(module, name))}
    return {
        name: list(inspect.signature(one).parameters) if takes(one) else None for name, one in named.items()
    }


def takes(named: Any) -> bool:
    return callable(named) and not (isinstance(named, type) and issubclass(named, BaseException))


def record(file: Path) -> None:
    import horovod
    import horovod.torch as hvd

    hvd.init()
    results = hvd.allgather_object(found(hvd, hvd.rank()))
    if hvd.rank() == 0:
        lines = [
            f"{json.dumps(name)}: {json.dumps([ranks[name] for ranks in results])}" for name in results[0]
        ]
        public = parameters(hvd, [name for name in dir(hvd) if name[0] != "_" and name != "check_extension"])
        elastic = parameters(hvd.elastic, hvd.elastic.__all__)
        names = {**public, **{f"elastic.{name}": words for name, words in elastic.items()}}
        named = ",\n".join(f"{json.dumps(name)}: {json.dumps(words)}" for name, words in names.items())
        head = f'"horovod": "{horovod.__version__}", "torch": "{torch.__version__}",\n'
        head += f'"names": {{\n{named}\n}},\n"found": {{\n'
        file.write_text("{" + head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
