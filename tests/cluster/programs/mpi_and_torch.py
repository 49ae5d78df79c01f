"""MPI and Gloo in one process: both count the same ranks, and both reduce over them."""

import os

import torch
import torch.distributed as dist
from mpi4py import MPI

world = MPI.COMM_WORLD
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (world.rank, world.size) == (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == world.allreduce(rank + 1) == size * (size + 1) / 2
library = MPI.Get_library_version().split(",")[0].split()
print(
    f"rank {rank} of {size} on {os.environ['HVLAUNCH_HOST']} is right, by {' '.join(library[:2])} too",
    flush=True,
)
dist.destroy_process_group()
