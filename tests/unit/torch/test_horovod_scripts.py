"""Scripts as Horovod's examples are made, by another import: what they print and train is as their users know it."""

import timeit
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvlaunch.torch as hvd
from tests.unit.torch.ranks import in_worlds


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(1, 4, kernel_size=3), nn.Dropout2d(0.1)
        self.last = nn.Linear(4 * 3 * 3, 4)

    def forward(self, x):
        x = torch.relu(nn.functional.max_pool2d(self.dropout(self.conv(x)), 2))
        return nn.functional.log_softmax(self.last(x.flatten(1)), dim=1)


def images(count, seed):
    """One of four corners is bright."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=chance)
    pictures = torch.rand(count, 1, 8, 8, generator=chance) / 2
    for picture, label in zip(pictures, labels, strict=True):
        row, column = divmod(int(label), 2)
        picture[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    return TensorDataset(pictures, labels)


def loader(data):
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(data, batch_size=8, sampler=sampler), sampler


def mnist_like(rank):
    hvd.init()
    torch.manual_seed(42)
    train_loader, train_sampler = loader(images(240, 1))
    test_loader, _ = loader(images(60, 2))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    for epoch in range(4):
        model.train()
        train_sampler.set_epoch(epoch)
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            nn.functional.nll_loss(model(inputs), labels).backward()
            optimizer.step()
    model.eval()
    right = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in test_loader)
    return hvd.allreduce(torch.tensor(right / 30), name="avg_accuracy").item()


def synthetic(rank):
    hvd.init()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), hvd.SyncBatchNorm(32), nn.Linear(32, 8)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data, target = torch.randn(4, 16), torch.randint(8, (4,))

    def benchmark_step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    seconds = timeit.timeit(benchmark_step, number=5)
    return hvd.mpi_threads_supported(), hvd.allreduce(torch.tensor(5 / seconds), op=hvd.Sum).item() > 0


def test_the_mnist_example_learns_on_all_workers_alike():
    accuracies = in_worlds(2, mnist_like)
    assert accuracies[0] == accuracies[1] > 0.9


def test_the_synthetic_benchmark_runs():
    assert in_worlds(2, synthetic) == [(False, True)] * 2
