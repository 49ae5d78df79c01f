"""The digits example with a checkpoint after each epoch, from which it resumes: elastic without using hvlaunch.

When workers come, go or fail, `hvlaunch --min-np …` stops all workers and starts the next round; this
script then goes on with the epoch after its last checkpoint. All hosts must share the checkpoint's directory.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_digits import Net, accuracy, digits, join, leave, train_epoch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="the file to resume from, and to write")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=120, help="of all ranks together (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=7e-3, help="Adam's first rate (default: %(default)s)")
    return parser.parse_args()


def save(path: Path, state: dict[str, object]) -> None:
    """Write all of the file or nothing: a worker may be killed at any moment."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = digits()
    net = Net().to(device)
    optimizer = torch.optim.Adam(net.parameters(), args.lr)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    begin, share = 0, 0.0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin, share = saved["epochs"], saved["share"]
    if rank == 0:
        print(f"{world_size} workers begin with epoch {begin + 1}", flush=True)
    model = DistributedDataParallel(net)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train_set, seed=args.seed)
    batches = DataLoader(train_set, batch_size=max(1, args.batch_size // world_size), sampler=sampler)
    for epoch in range(begin + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - (epoch - 1) / args.epochs)
        loss = train_epoch(model, batches, optimizer, schedule, device)
        share = accuracy(net, test_set, device)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs} loss {loss:.4f} accuracy {share:.3f}", flush=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            save(args.checkpoint, {**state, "epochs": epoch, "share": share})
    if rank == 0:
        print(f"accuracy {share:.3f} ranks {world_size}", flush=True)


def main() -> None:
    args = arguments()
    device = join()
    train(args, device)
    leave()


if __name__ == "__main__":
    main()
