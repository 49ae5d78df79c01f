"""torch's FSDP2 (fully_shard), and its distributed checkpoint (DCP) of the sharded model."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model: Any = fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
where = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(where)
folder = Path(str(where[0]))
before = model.weight.full_tensor().clone()
dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id=folder)
model.load_state_dict(state["model"])
assert torch.equal(model.weight.full_tensor(), before)
assert model.weight.to_local().shape[0] == 8 // size
dist.barrier()
if rank == 0:
    shutil.rmtree(folder)
print("right", os.environ["RANK"], flush=True)
dist.destroy_process_group()
