"""Train a small convolutional network on scikit-learn's digits with plain DistributedDataParallel.

It works with any launcher: it reads the `env://` variables, and trains in one process if they are not set.
"""

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: if it is imported later, torch keeps the group
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TEST_SHARE = 0.2


class Net(nn.Sequential):
    """Two convolutions and two dense layers for 8 x 8 images.

    Without batch norm or dropout, so that N ranks take the same steps as one.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=120, help="of all ranks together (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=7e-3, help="Adam's highest rate (default: %(default)s)")
    return parser.parse_args()


def join() -> torch.device:
    """Join the process group that the environment describes, or make a group of one process."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    own_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if own_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if own_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave() -> None:
    """Leave the group, and wait for Gloo's threads: if one still works when Python ends, it aborts the process.

    Only the group's last owner waits for them. A model in DistributedDataParallel is an owner, so it must be deleted before.
    """
    gc.collect()
    dist.destroy_process_group()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The images for training and for the test; always the same split."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = int(len(labels) * TEST_SHARE)
    test, train = order[:held_out], order[held_out:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train_epoch(
    model: nn.Module,
    batches: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    device: torch.device,
) -> float:
    """Go once through this rank's share; returns the mean loss of all ranks."""
    loss_sum = torch.zeros(1, device=device)
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum)
    return loss_sum.item() / len(batches) / dist.get_world_size()


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Each rank tests every world_size-th image; the counts are added up."""
    images, labels = test[dist.get_rank() :: dist.get_world_size()]
    right = model(images.to(device)).argmax(dim=1) == labels.to(device)
    counts = torch.tensor([int(right.sum()), len(labels)], device=device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    started = time.monotonic()

    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    train_set, test_set = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, seed=args.seed)
    batches = DataLoader(train_set, batch_size=max(1, args.batch_size // world_size), sampler=sampler)
    net = Net().to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(batches))

    share = 0.0
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, batches, optimizer, schedule, device)
        share = accuracy(net, test_set, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs} loss {loss:.4f} accuracy {share:.3f}", flush=True)

    if rank == 0:
        seconds = time.monotonic() - started
        print(f"accuracy {share:.3f} seconds {seconds:.1f} ranks {world_size}", flush=True)


def main() -> None:
    args = arguments()
    device = join()
    train(args, device)
    leave()


if __name__ == "__main__":
    main()
