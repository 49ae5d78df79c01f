"""Train the network of ddp_digits.py, with hvlaunch.torch for everything around the training.

The same program runs under hvlaunch, torchrun, mpirun and srun, and as a single process.
"""

import argparse
import time

import torch
from ddp_digits import Net, digits, train_epoch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvlaunch.torch as hvt


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


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Each rank tests every size-th image; the counts are added up."""
    images, labels = test[hvt.rank() :: hvt.size()]
    right = model(images.to(hvt.device())).argmax(dim=1).cpu() == labels
    counts = hvt.allreduce(torch.tensor([int(right.sum()), len(labels)]), op=hvt.Sum)
    return counts[0].item() / counts[1].item()


def main() -> None:
    args = arguments()
    hvt.init()
    started = time.monotonic()

    torch.manual_seed(
        args.seed + hvt.rank()
    )  # different random numbers on each rank; all start with the parameters of rank 0
    torch.backends.cudnn.deterministic = True
    net = Net().to(hvt.device())
    hvt.broadcast_parameters(net)
    model = DistributedDataParallel(net, init_sync=False)

    train_set, test_set = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, seed=args.seed)
    batches = DataLoader(train_set, batch_size=max(1, args.batch_size // hvt.size()), sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(batches))

    share = 0.0
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, batches, optimizer, schedule, hvt.device())
        share = accuracy(net, test_set)
        if hvt.rank() == 0:
            print(f"epoch {epoch}/{args.epochs} loss {loss:.4f} accuracy {share:.3f}", flush=True)

    if hvt.rank() == 0:
        seconds = time.monotonic() - started
        print(f"accuracy {share:.3f} seconds {seconds:.1f} ranks {hvt.size()}", flush=True)
    hvt.shutdown()


if __name__ == "__main__":
    main()
