"""What recovery.py trains: steps of a few milliseconds on Gloo, each told in one file that all workers share.

training.py FILE [--elastic]: by hvlaunch.torch.elastic, or as an unmodified env:// script that any launcher starts
anew. It trains until it is stopped.
"""

import json
import os
import random
import socket
import sys
import time

import torch
from torch import distributed as dist
from torch import nn

COMMIT_EVERY = 10
PAUSE = 0.003
"""Seconds between two steps, so that a machine shared by all workers has time for something else."""


class Log:
    """A line for each step: one write, so that workers can share the file."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = {"host": socket.gethostname(), "pid": os.getpid()}

    def tell(self, run: int, step: int) -> None:
        where = {"rank": dist.get_rank(), "size": dist.get_world_size(), "run": run, "step": step}
        line = json.dumps({"at": time.monotonic(), **self._who, **where})
        os.write(self._fd, f"{line}\n".encode())


def drawn() -> int:
    """A number that tells this round's workers from all others; rank 0 draws it."""
    number = torch.tensor([random.getrandbits(50)])
    dist.broadcast(number, 0)
    return int(number)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def one_step(model: nn.Module) -> None:
    """Without DistributedDataParallel and torch.optim: what these import when first used takes longer than torch."""
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    weights = list(model.parameters())
    gradients = torch.cat([one.grad.reshape(-1) for one in weights if one.grad is not None])
    dist.all_reduce(gradients)
    parts = gradients.split([one.numel() for one in weights])
    with torch.no_grad():
        for weight, gradient in zip(weights, parts, strict=True):
            weight.sub_(gradient.view(weight.shape), alpha=1e-4)


def elastic_training(log: Log) -> None:
    from hvlaunch.torch import elastic  # noqa: PLC0415 (the unmodified script knows nothing of it)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        run = drawn()
        while True:
            one_step(state.model)
            state.step += 1
            log.tell(run, state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            time.sleep(PAUSE)

    train(elastic.TorchState(model=net(), step=0))


def unmodified(log: Log) -> None:
    dist.init_process_group("gloo")
    model = net()
    run, step = drawn(), 0
    while True:
        one_step(model)
        step += 1
        log.tell(run, step)
        time.sleep(PAUSE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (elastic_training if "--elastic" in sys.argv else unmodified)(Log(sys.argv[1]))
