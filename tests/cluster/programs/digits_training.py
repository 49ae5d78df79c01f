"""The digits training of elastic_training.py, with torch and Gloo, in its two ways; each says what it came to."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from orders import Orders
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from ddp_digits import Net, accuracy, digits, leave

COMMIT_EVERY = 4
EPOCHS = 8
BATCH = 120
STEP = 0.05

Batch = tuple[torch.Tensor, torch.Tensor]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, orders: Orders, number: int
) -> tuple[int, bool]:
    """The number of workers that took part, and whether any of them has heard that the training is to end."""
    orders.obey("step")
    time.sleep(STEP)
    images, labels = batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    told = torch.tensor([1, int(orders.is_over), int(orders.dooms(number))])
    dist.all_reduce(told)
    if told[2]:
        raise ValueError("the test wants all workers to fail")
    return int(told[0]), bool(told[1])


def begins(number: int, step: int) -> list[int]:
    if dist.get_rank() == 0:
        print(f"round {number} has {dist.get_world_size()} at step {step}", flush=True)
    return [number, step, dist.get_world_size()]


def done(net: nn.Module, step: int, weight: int, rounds: list[list[int]]) -> None:
    share = accuracy(net, digits()[1], torch.device("cpu"))
    if dist.get_rank() == 0:
        report = {"step": step, "weight": weight, "rounds": rounds, "accuracy": share}
        print("done " + json.dumps(report), flush=True)


def in_process(orders: Orders) -> None:
    from hvlaunch.torch import current, elastic

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        orders.obey("join")
        number = current_round()
        state.rounds.append(begins(number, state.step))
        model = DistributedDataParallel(state.model)
        for batch in batches(state):
            size, is_over = train_step(model, state.optimizer, batch, orders, number)
            state.weight += size
            state.step += 1
            state.sampler.record_batch(0, len(batch[0]))
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                if dist.get_rank() == 0:
                    print(f"commit at step {state.step}", flush=True)
                if is_over and state.epoch >= EPOCHS:
                    break
        done(state.model, state.step, state.weight, state.rounds)

    def batches(state: elastic.TorchState) -> Iterator[Batch]:
        while True:
            state.sampler.set_epoch(state.epoch)
            yield from DataLoader(digits()[0], BATCH // dist.get_world_size(), sampler=state.sampler)
            state.epoch += 1

    def current_round() -> int:
        return current.world().place.round or 0

    torch.manual_seed(0)
    net = Net()
    train(
        elastic.TorchState(
            model=net,
            optimizer=torch.optim.Adam(net.parameters(), 5e-3),
            sampler=elastic.ElasticSampler(digits()[0]),
            epoch=0,
            step=0,
            weight=0,
            rounds=[],
        )
    )


def by_restarts(orders: Orders, checkpoint: Path) -> None:
    dist.init_process_group("gloo")
    train_from(orders, checkpoint)
    leave()


def train_from(orders: Orders, checkpoint: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    state: dict[str, Any] = {"epoch": 0, "step": 0, "weight": 0, "rounds": []}
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    state["rounds"].append(begins(number, state["step"]))
    model = DistributedDataParallel(net)
    train_set, _ = digits()
    sampler: DistributedSampler[Any] = DistributedSampler(train_set)
    is_over = False
    while not (is_over and state["epoch"] > EPOCHS):
        sampler.set_epoch(state["epoch"])
        for batch in DataLoader(train_set, BATCH // dist.get_world_size(), sampler=sampler):
            size, is_over = train_step(model, optimizer, batch, orders, number)
            state["weight"] += size
            state["step"] += 1
            if state["step"] % COMMIT_EVERY == 0 and dist.get_rank() == 0:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "state": state}
                torch.save(saved, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                print(f"commit at step {state['step']}", flush=True)
        state["epoch"] += 1
    done(net, state["step"], state["weight"], state["rounds"])
