"""Steps of computing, sleeping and an all_reduce by Gloo, elastic, until DIR has a file `end`: elastic_steps.py DIR."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hvlaunch.torch as hvt
from hvlaunch.torch import elastic

COMPUTES, SLEEPS = 0.04, 0.08
"""Seconds of processor time, and seconds, in each step."""


@elastic.run
def train(state: elastic.TorchState) -> None:
    while True:
        since = time.thread_time()
        while time.thread_time() - since < COMPUTES:
            pass
        time.sleep(SLEEPS)
        value = torch.tensor([1.0, float((Path(sys.argv[1]) / "end").exists())])
        dist.all_reduce(value)
        state.step += 1
        state.weight += int(value[0].item())
        hvt.progress(state.step)
        # Before the commit, which leaves the round where it changes.
        if dist.get_rank() == 0:
            print(f"step {state.step} at {time.monotonic():.4f}", flush=True)
        state.commit()
        if value[1].item():
            if dist.get_rank() == 0:
                print("done", json.dumps({"step": state.step, "weight": state.weight}), flush=True)
            return


state = elastic.TorchState(model=torch.nn.Linear(1, 1), step=0, weight=0)
train(state)
