"""Collectives by Horovod's names: each is compared with what it must come to, on 3 ranks."""

import time
from typing import Any

import pytest
import torch

import hvlaunch.torch as hvd
from tests.unit.torch.ranks import LONG, in_worlds

SIZE = 3
TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.int16,
]


def reductions(rank):
    for dtype in TYPES:
        mine = [torch.tensor([[each + 1, 7], [2 * each, 3]], dtype=dtype) for each in range(SIZE)]
        whole = torch.stack(mine)
        before = mine[rank].clone()
        assert torch.equal(hvd.allreduce(mine[rank], op=hvd.Sum), whole.sum(0).to(dtype))
        assert torch.equal(hvd.allreduce(mine[rank], op=hvd.Min), whole.amin(0))
        assert torch.equal(hvd.allreduce(mine[rank], op=hvd.Max), whole.amax(0))
        assert torch.equal(hvd.allreduce(mine[rank], op=hvd.Product), whole.prod(0).to(dtype))
        mean = torch.div(whole.sum(0).double(), SIZE).to(dtype)
        assert torch.allclose(hvd.allreduce(mine[rank]), mean)
        assert torch.equal(mine[rank], before)
        handle = hvd.allreduce_async_(mine[rank], name="some", op=hvd.Sum, prescale_factor=2.0)
        assert hvd.synchronize(handle) is mine[rank]
        assert hvd.poll(handle)
        assert torch.equal(mine[rank], (2 * whole).sum(0).to(dtype))
    scaled = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled.tolist() == [6.0, 6.0]
    assert hvd.allreduce(torch.tensor([-5 - rank])).item() == -6
    assert hvd.allreduce(torch.tensor([True, rank == 1, False]), op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(torch.tensor(float(rank)), average=False).item() == 3.0
    fp16 = hvd.allreduce(torch.full((4,), 1 / 3), compression=hvd.Compression.fp16)
    assert fp16.dtype == torch.float32
    assert torch.allclose(fp16, torch.full((4,), 1 / 3), atol=1e-3)
    several = hvd.grouped_allreduce([torch.tensor([rank]), torch.tensor([[2.0 * rank]])], op=hvd.Sum)
    assert [one.tolist() for one in several] == [[3], [[6.0]]]
    turned = torch.arange(6.0).reshape(2, 3).t() * rank
    assert hvd.allreduce_(turned, op=hvd.Sum).tolist() == [[0, 9], [3, 12], [6, 15]]
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)


def polled(rank):
    """Where poll() is true, the tensors have their values."""
    one, two, root = (torch.full((2,), rank + 1.0) for _ in range(3))
    handles: list[hvd.Handle[Any]] = [
        hvd.allreduce_async_(one, op=hvd.Sum),
        hvd.grouped_allreduce_async_([two], op=hvd.Max),
        hvd.broadcast_async_(root, 1),
    ]
    limit = time.monotonic() + LONG
    while not all(hvd.poll(handle) for handle in handles):
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert (one.tolist(), two.tolist(), root.tolist()) == ([6.0] * 2, [3.0] * 2, [2.0] * 2)
    assert hvd.synchronize(handles[0]) is one


def gathers(rank):
    for dtype in (*TYPES, torch.bool):
        rows = torch.full((rank + 1, 2), rank, dtype=dtype)
        expected = torch.cat([torch.full((each + 1, 2), each, dtype=dtype) for each in range(SIZE)])
        assert torch.equal(hvd.allgather(rows), expected)
        assert torch.equal(hvd.broadcast(rows[:1], root_rank=1), torch.full((1, 2), 1, dtype=dtype))
        assert hvd.broadcast_(rows[:1], 2)[0, 0] == torch.tensor(2, dtype=dtype)
    with pytest.raises(RuntimeError, match="invalid root rank") as error:
        hvd.broadcast(torch.ones(1), 7)
    assert not isinstance(error.value, hvd.HorovodInternalError)  # nobody is lost
    assert hvd.allgather(torch.tensor(rank)).tolist() == [0, 1, 2]
    assert hvd.allgather(torch.zeros(0 if rank else 1, 3)).shape == (1, 3)
    with pytest.raises(ValueError, match="all dimensions but the first"):
        hvd.allgather(torch.zeros(1, rank + 1))
    with pytest.raises(ValueError, match="dimensions can't be put together"):
        hvd.allgather(torch.zeros([1] * (rank + 1)))
    with pytest.raises(ValueError, match="must be of one type, and are of float32, int32"):
        hvd.allgather(torch.zeros(1, dtype=torch.int32 if rank == 1 else torch.float32))


def exchanges(rank):
    rows = torch.arange(6).reshape(6, 1) + 10 * rank
    assert hvd.alltoall(rows).flatten().tolist() == [
        10 * each + 2 * rank + more for each in range(3) for more in (0, 1)
    ]
    splits = torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 1]][rank])
    found, received = hvd.alltoall(rows[: int(splits.sum())], splits)
    expected = {0: [10, 11, 12, 20], 1: [0, 21], 2: [1, 2, 22]}[rank]
    assert found.flatten().tolist() == expected
    assert received.tolist() == [[0, 3, 1], [1, 0, 1], [2, 0, 1]][rank]
    with pytest.raises(ValueError, match="can't be divided"):
        hvd.alltoall(torch.zeros(4))
    with pytest.raises(ValueError, match="must be of one type, and are of float16, float32"):
        hvd.alltoall(torch.zeros(3, dtype=torch.float16 if rank == 1 else torch.float32))
    with pytest.raises(ValueError, match="whose sum is 4"):
        hvd.alltoall(torch.zeros(4), [1, 1, 1])
    tensor = torch.arange(10.0).reshape(5, 2) * (rank + 1)
    own = [(0, 2), (2, 4), (4, 5)][rank]
    whole = torch.arange(10.0).reshape(5, 2)
    assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), 6 * whole[slice(*own)])
    assert torch.equal(hvd.reducescatter(tensor), 2 * whole[slice(*own)])
    with pytest.raises(ValueError, match="op is Average or Sum"):
        hvd.reducescatter(tensor, op=hvd.Max)
    hvd.barrier()


def gradients(rank):
    """Gradients of a loss that each rank weighs by its number: the average over the ranks."""
    for function, expected in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum).sum() * rank, 3.0),
        (lambda x: hvd.allreduce(x).sum() * rank, 1.0),
        (lambda x: hvd.allgather(x).sum() * rank, 1.0),
        (lambda x: hvd.broadcast(x, 1).sum() * rank, 1.0 if rank == 1 else 0.0),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum).sum() * 2, 6.0),
        (lambda x: hvd.reducescatter(x).sum() * 2, 2.0),
    ):
        tensor = torch.ones(3, 2, requires_grad=True)
        function(tensor).backward()
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.full((3, 2), expected)), expected
    tensor = torch.ones(3, 2, requires_grad=True)
    (hvd.alltoall(tensor) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad[:, 0].tolist() == [1.0, 2.0, 3.0]


def some(rank):
    ends = hvd.add_process_set([2, 0])
    assert (ends.ranks, ends.size(), ends.included()) == ([0, 2], 2, rank != 1)
    if rank != 1:
        assert ends.rank() == rank // 2
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=ends).item() == 2
        assert hvd.allgather_object(rank, process_set=ends) == [0, 2]
        assert hvd.broadcast(torch.tensor([rank]), 2, process_set=ends).item() == 2
        assert (
            hvd.reducescatter(torch.arange(3), op=hvd.Sum, process_set=ends).tolist()
            == [[0, 2], [], [4]][rank]
        )
    else:
        with pytest.raises(ValueError, match=r"rank 1 is not in ProcessSet\(\[0, 2\]\)"):
            hvd.allreduce(torch.zeros(1), process_set=ends)
    assert hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(ends)
    with pytest.raises(ValueError, match="was not added"):
        hvd.allreduce(torch.zeros(1), process_set=ends)
    with pytest.raises(ValueError, match="has the ranks 0 to 2"):
        hvd.add_process_set([0, 3])
    assert hvd.global_process_set.size() == 3


@pytest.mark.parametrize(
    "what", [reductions, polled, gathers, exchanges, gradients, some], ids=lambda what: what.__name__
)
def test_collectives_return_the_expected_values(what):
    in_worlds(SIZE, what)


def test_without_a_world():
    with pytest.raises(RuntimeError, match=r"hvlaunch\.torch\.init"):
        hvd.allreduce(torch.zeros(1))
