"""An unmodified env:// script: every rank takes part in each collective, and checks the result."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == size * (size + 1) / 2
told = torch.tensor([float(rank)])
dist.broadcast(told, src=size - 1)
assert told.item() == size - 1
dist.barrier()
print(f"rank {rank} of {size} on {os.environ['HVLAUNCH_HOST']} is right", flush=True)
dist.destroy_process_group()
