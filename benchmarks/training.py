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
from torch.nn.parallel import DistributedDataParallel

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


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def elastic_training(log: Log) -> None:
    from hvlaunch.torch import elastic  # noqa: PLC0415 (the unmodified script knows nothing of it)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        model = DistributedDataParallel(state.model)
        run = drawn()
        while True:
            one_step(model, state.optimizer)
            state.step += 1
            log.tell(run, state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
            time.sleep(PAUSE)

    model = net()
    train(elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 1e-3), step=0))


def unmodified(log: Log) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run, step = drawn(), 0
    while True:
        one_step(model, optimizer)
        step += 1
        log.tell(run, step)
        time.sleep(PAUSE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    (elastic_training if "--elastic" in sys.argv else unmodified)(Log(sys.argv[1]))
