"""DistributedOptimizer: what it trains is what DistributedDataParallel trains."""

import warnings
from typing import Any

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


def other_collectives_before_the_step(rank):
    """Other collectives of hvlaunch.torch and torch, also in the backward pass, while only some ranks have gradients."""
    model, other = net(), net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model))
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    plain = optimizer_of(other)
    for inputs, wanted in batches(rank):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs, seldom=rank == 1), wanted)
        mean = hvd.allreduce(loss)
        (loss + 0 * mean).backward()
        assert hvd.allreduce(torch.full((8,), 100.0 * rank), op=hvd.Sum).tolist() == [300.0] * 8
        torch.distributed.all_reduce(whole := torch.full((8, 4), float(rank)))
        assert whole[0, 0] == 3
        optimizer.step()
        plain.zero_grad()
        nn.functional.mse_loss(wrapped(inputs, seldom=rank == 1), wanted).backward()
        plain.step()
    same(model, other)


def two_optimizers(rank):
    """One backward pass gives some ranks gradients for both, and others for one."""
    model, other = net(), net()
    parts = [[*each.first.parameters(), *each.second.parameters()] for each in (model, other)]
    rest = [list(each.seldom.parameters()) for each in (model, other)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(each, lr=0.1, momentum=0.9)) for each in (parts[0], rest[0])
    ]
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    plain = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (parts[1], rest[1])]
    for inputs, wanted in batches(rank):
        for each in (*optimizers, *plain):
            each.zero_grad()
        for one in (model, wrapped):
            nn.functional.mse_loss(one(inputs, seldom=rank != 1), wanted).backward()
        for each in (*optimizers, *plain):
            each.step()
    same(model, other)


def none_has_a_gradient_but_one(rank):
    model = net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model))
    if rank == 1:
        inputs, wanted = batches(rank)[0]
        nn.functional.mse_loss(model(inputs), wanted).backward()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == SIZE
    optimizer.step()
    assert len(set(hvd.allgather_object(model.first.weight.sum().item()))) == 1
    assert model.first.weight.grad.abs().sum() > 0


def scheduled_before(rank):
    model, other = net(), net()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    second = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = optimizer_of(other)
    schedulers = (
        torch.optim.lr_scheduler.StepLR(plain, 1, 0.5),
        torch.optim.lr_scheduler.StepLR(plain, 2, 0.5),
    )
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs, wanted in batches(rank):
            optimizer.load_state_dict(optimizer.state_dict())
            for one, its, whose in ((model, optimizer, (scheduler, second)), (wrapped, plain, schedulers)):
                its.zero_grad()
                nn.functional.mse_loss(one(inputs), wanted).backward()
                its.step()
                for each in whose:
                    each.step()
    rates = [its.param_groups[0]["lr"] for its in (optimizer, plain)]
    assert rates[0] == pytest.approx(rates[1])
    assert rates[1] < 0.01
    same(model, other)


def distributed_in_each_round_anew(rank):
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert model.second.bias.grad.item() == SIZE


def with_a_closure(rank):
    model, other = net(), net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model))
    plain = optimizer_of(other)
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    for inputs, wanted in batches(rank):
        for one, its in ((model, optimizer), (wrapped, plain)):

            def closure(one=one, its=its, inputs=inputs, wanted=wanted):
                its.zero_grad()
                loss = nn.functional.mse_loss(one(inputs), wanted)
                loss.backward()
                return loss

            assert its.step(closure) > 0
    same(model, other)


def parameters_that_come_later(rank):
    model, other = net(), net()
    model.first.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9))
    optimizer.add_param_group({"params": [*model.first.parameters(), *model.seldom.parameters()]})
    model.first.requires_grad_(True)
    trained(rank, model, optimizer)
    trained(rank, DistributedDataParallel(other, find_unused_parameters=True), optimizer_of(other))
    same(model, other)


def some_step_alone(rank):
    ends = hvd.add_process_set([0, 2])
    model = net()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), process_set=ends)
    trained(rank, model, optimizer)
    sums = hvd.allgather_object(model.first.weight.sum().item())
    assert sums[0] == sums[2] != sums[1]
    alone = net()
    trained(1, alone, optimizer_of(alone))
    if rank == 1:
        same(model, alone)


def buckets_of_types_and_sizes(rank):
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).double(), nn.Linear(2, 1)
    )
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    expected = []
    for number, each in enumerate(model.parameters()):
        each.grad = torch.full_like(each, rank + number)
        expected.append(torch.full_like(each, 3 + 3 * number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvlaunch.torch.optimizer._BUCKETS", {"cpu": 64})
        optimizer.synchronize()
    for each, wanted in zip(model.parameters(), expected, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, wanted)


def wrong(rank):
    model = net()
    with pytest.raises(ValueError, match=r"'a' twice"):
        hvd.DistributedOptimizer(optimizer_of(model), [("a", model.first.weight), ("a", model.first.bias)])
    with pytest.raises(ValueError, match=r"lacks 5 of the optimizer's parameters"):
        hvd.DistributedOptimizer(optimizer_of(model), [("a", model.first.weight)])


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
    [
        as_ddp,
        with_a_layer_that_some_use,
        other_collectives_before_the_step,
        two_optimizers,
        none_has_a_gradient_but_one,
        scheduled_before,
        distributed_in_each_round_anew,
        with_a_closure,
        parameters_that_come_later,
        some_step_alone,
        buckets_of_types_and_sizes,
        several_passes,
        clipped,
        wrong,
        rows_of_an_embedding,
    ],
    ids=lambda what: what.__name__,
)
def test_training(what):
    in_worlds(SIZE, what)
