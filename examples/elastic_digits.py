"""Train the digits example while workers come and go; workers that stay are not started again.

Only `train` is different from ddp_digits.py: it is called once in each round, goes on from the state, and commits
from time to time. Without hvlaunch it trains in one process.
"""

import argparse
import time

import torch
from ddp_digits import Net, accuracy, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import hvlaunch.torch as hvt
from hvlaunch.torch import elastic


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=120, help="of all ranks together (default: %(default)s)"
    )
    parser.add_argument("--commit-every", type=int, default=2, metavar="STEPS")
    parser.add_argument(
        "--step-time",
        type=float,
        default=0.0,
        help="shortest time of a step in seconds, so that you can watch",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=7e-3, help="Adam's highest rate (default: %(default)s)")
    return parser.parse_args()


def rate(progress: float) -> float:
    """It rises in the first third of the training, then falls; `progress` counts epochs, since the number of steps changes."""
    return min(progress * 3 + 0.05, 1.05 - progress)


@elastic.run
def train(state: elastic.TorchState, args: argparse.Namespace) -> None:
    train_set, test_set = digits()
    device = hvt.device()
    model = DistributedDataParallel(state.model.to(device))
    batches = DataLoader(train_set, max(1, args.batch_size // hvt.size()), sampler=state.sampler)
    if hvt.rank() == 0:
        print(f"{hvt.size()} workers go on at epoch {state.epoch + 1}, step {state.step}", flush=True)
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        for images, labels in batches:
            started = time.monotonic()
            done = state.epoch + state.sampler.processed / len(train_set)
            for group in state.optimizer.param_groups:
                group["lr"] = args.lr * rate(done / args.epochs)
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            state.sampler.record_batch(state.step, len(images))
            state.step += 1
            if state.step % args.commit_every == 0:
                state.commit()
            time.sleep(max(0.0, args.step_time - (time.monotonic() - started)))
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.share = accuracy(state.model, test_set, device)
        if hvt.rank() == 0:
            print(f"epoch {state.epoch}/{args.epochs} accuracy {state.share:.3f}", flush=True)
        state.commit()
    if hvt.rank() == 0:
        print(f"accuracy {state.share:.3f} steps {state.step} ranks {hvt.size()}", flush=True)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    net = Net()
    train_set, _ = digits()
    state = elastic.TorchState(
        model=net,
        optimizer=torch.optim.Adam(net.parameters()),
        sampler=elastic.ElasticSampler(train_set, seed=args.seed),
        epoch=0,
        step=0,
        share=0.0,
    )
    train(state, args)


if __name__ == "__main__":
    main()
