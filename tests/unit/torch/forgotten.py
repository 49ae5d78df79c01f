"""A worker that hangs in a broadcast: it commits, and sends without end; alone in a round, it tells what it has."""

import json
import os

import torch
from torch import distributed as dist

import hvlaunch.torch as hvt
from hvlaunch.rendezvous import Client
from hvlaunch.torch import elastic

__all__ = ["SIZE"]

SIZE = 256 << 20
"""Bytes of a message: more than connections hold, and enough to be stopped in its middle."""


def main() -> None:
    state = elastic.TorchState(text="new")

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        if hvt.size() == 1:
            return
        state.commit()
        state.text = "committed"
        state.save()
        state.text = "lost"
        message = torch.ones(SIZE, dtype=torch.uint8)
        while True:
            dist.broadcast(message, 0)

    train(state)
    with Client.from_environment() as client:
        client.put("test", "done", json.dumps([os.getpid(), state.text, state.commits]).encode())


if __name__ == "__main__":
    main()
