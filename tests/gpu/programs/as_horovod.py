"""What hvlaunch.torch comes to on GPUs, next to what Horovod came to; rank 0 prints what differs, as JSON.

as_horovod.py RECORDED: see tests/unit/torch/horovod_cases.py.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import hvlaunch.torch as hvd
from tests.unit.torch.horovod_cases import found, same

STEPS = 5


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to(hvd.device())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    chance = torch.Generator(hvd.device()).manual_seed(hvd.rank())
    for _ in range(STEPS):
        inputs = torch.randn(32, 64, generator=chance, device=hvd.device())
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def farthest() -> float:
    """How far a model is from DDP's, at most."""
    ours, ddps = net(), net()
    trained(ours, hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)))
    trained(DistributedDataParallel(ddps), torch.optim.SGD(ddps.parameters(), lr=0.1, momentum=0.9))
    pairs = zip(ours.parameters(), ddps.parameters(), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


hvd.init()
recorded = json.loads(Path(sys.argv[1]).read_text())["found"]
apart = farthest()
torch.set_default_device(hvd.device())
mine = found(hvd, hvd.rank())
torch.set_default_device("cpu")
everyones = hvd.allgather_object(mine)
large = hvd.allreduce(torch.ones(1 << 26, device=hvd.device()), op=hvd.Sum)
handle = hvd.allreduce_async(torch.ones(1 << 20, device=hvd.device()), op=hvd.Sum)
while not hvd.poll(handle):
    pass
if hvd.rank() == 0:
    differs = {
        name: [theirs, [ranks[name] for ranks in everyones]]
        for name, theirs in recorded.items()
        if theirs != [None] * hvd.size() and not same([ranks[name] for ranks in everyones], theirs)
    }
    report = {
        "backend": dist.get_backend(),
        "device": str(hvd.device()),
        "compared": len(recorded),
        "differs": differs,
        "apart": apart,
        "large": [float(large.min()), float(large.max())],
        "polled": float(hvd.synchronize(handle).max()),
        "nccl": hvd.nccl_built(),
    }
    print("done " + json.dumps(report), flush=True)
hvd.shutdown()
