"""An elastic training on GPUs; it obeys and reports as tests/cluster/programs/elastic_sums.py does.

elastic.py DIR: most of the time of a step its ranks wait on the GPU for a sum over all of them. With COLLECTIVE_SECONDS a
collective may take no longer than that.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster" / "programs"))
from orders import Orders

from hvlaunch.torch import current, elastic, init
from hvlaunch.torch.backends import gpu_backends

COMMIT_EVERY = 4
orders = Orders(Path(sys.argv[1]))
orders.obey("start")


@elastic.run
def train(state: elastic.TorchState) -> None:
    world = current.world()
    assert dist.get_backend() == "nccl"
    classes = {type(backend).__name__ for backend in gpu_backends()}
    assert classes == {
        "ProcessGroupNCCL2" if os.environ["TORCH_DIST_USE_NCCL2"] == "1" else "ProcessGroupNCCL"
    }
    size = dist.get_world_size()
    state.rounds.append([world.place.round, state.step, size])
    if dist.get_rank() == 0:
        print(f"round {world.place.round} has {size} at step {state.step}", flush=True)
    model = DistributedDataParallel(state.model)
    large = torch.ones(1 << 22, device=world.device)
    is_over = False
    while not is_over:
        orders.obey("step")
        state.optimizer.zero_grad()
        model(torch.ones(8, 64, device=world.device)).square().mean().backward()
        state.optimizer.step()
        for _ in range(10):
            dist.all_reduce(large)
            large /= size
        told = torch.tensor([1, int(orders.is_over)], device=world.device)
        dist.all_reduce(told)
        state.weight += int(told[0])
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            if dist.get_rank() == 0:
                print(f"commit at step {state.step} {time.time():.3f}", flush=True)
            is_over = bool(told[1])
    if dist.get_rank() == 0:
        report = {
            "step": state.step,
            "weight": state.weight,
            "rounds": state.rounds,
            "kept": float(large.mean()),
        }
        print("done " + json.dumps(report), flush=True)


if seconds := os.environ.get("COLLECTIVE_SECONDS"):
    init(timeout=float(seconds))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).cuda()
train(
    elastic.TorchState(model=net, optimizer=torch.optim.Adam(net.parameters()), step=0, weight=0, rounds=[])
)
