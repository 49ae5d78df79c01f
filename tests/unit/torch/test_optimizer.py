"""DistributedOptimizer: what it trains is what DistributedDataParallel trains."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvlaunch.torch as hvd
from tests.unit.torch.ranks import in_worlds

SIZE = 3
STEPS = 6


class Net(nn.Module):
    """With a layer that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seldom = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(4, 1)

    def forward(self, x, *, seldom=False):
        result = self.second(torch.tanh(self.first(x)))
        return result + self.seldom(x) if seldom else result


def batches(rank):
    chance = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(5, 4, generator=chance), torch.randn(5, 1, generator=chance)) for _ in range(STEPS)]


def net():
    torch.manual_seed(7)
    return Net()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(rank, model, optimizer, **how):
    for inputs, wanted in batches(rank):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs, **how), wanted).backward()
        optimizer.step()


def same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=1e-6)


def as_ddp(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained(rank, model, optimizer)
    other = net()
    trained(rank, DistributedDataParallel(other, find_unused_parameters=True), optimizer_of(other))
    same(model, other)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def with_a_layer_that_some_use(rank):
    model, other = net(), net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model))
    trained(rank, model, optimizer, seldom=rank == 1)
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    trained(rank, wrapped, optimizer_of(other), seldom=rank == 1)
    same(model, other)


def several_passes(rank):
    model, other = net(), net()
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model), backward_passes_per_step=2, gradient_predivide_factor=4.0
    )
    plain = optimizer_of(other)
    for each in range(0, STEPS, 2):
        for inputs, wanted in batches(rank)[each : each + 2]:
            nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        for owner in range(SIZE):
            for inputs, wanted in batches(owner)[each : each + 2]:
                (nn.functional.mse_loss(other(inputs), wanted) / SIZE).backward()
        for parameter in other.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        plain.step()
        plain.zero_grad()
    same(model, other)


def clipped(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), compression=hvd.Compression.fp16)
    inputs, wanted = batches(rank)[0]
    nn.functional.mse_loss(model(inputs), wanted).backward()
    optimizer.synchronize()
    norms = hvd.allgather_object(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    assert len(set(norms)) == 1
    with optimizer.skip_synchronize():
        optimizer.step()
    assert len(set(hvd.allgather_object(float(next(model.parameters()).sum())))) == 1


def wrong(rank):
    model = net()
    with pytest.raises(ValueError, match=r"'a' twice"):
        hvd.DistributedOptimizer(optimizer_of(model), [("a", model.first.weight), ("a", model.first.bias)])
    with pytest.raises(ValueError, match=r"lacks 5 of the optimizer's parameters"):
        hvd.DistributedOptimizer(optimizer_of(model), [("a", model.first.weight)])
    layer = nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(optimizer_of(layer))
    inputs, wanted = batches(0)[0]
    nn.functional.mse_loss(layer(inputs), wanted).backward()
    with pytest.raises(RuntimeError, match="on their way"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="more than 1 backward passes"):
        nn.functional.mse_loss(layer(inputs), wanted).backward()
    optimizer.step()


def rows_of_an_embedding(rank):
    table, other = nn.Embedding(10, 2, sparse=True), nn.Embedding(10, 2, sparse=True)
    other.load_state_dict(hvd.broadcast_object(table.state_dict()))
    hvd.broadcast_parameters(table, 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    dense = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0), sparse_as_dense=True)
    for each in (table, other):
        each(torch.tensor([rank, rank + 1, 0])).sum().backward()
    optimizer.step()
    dense.step()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    same(table, other)


@pytest.mark.parametrize(
    "what",
    [as_ddp, with_a_layer_that_some_use, several_passes, clipped, wrong, rows_of_an_embedding],
    ids=lambda what: what.__name__,
)
def test_training(what):
    in_worlds(SIZE, what)
