"""Sums the ranks over all workers, by torch's Gloo."""

import torch
from torch import distributed

distributed.init_process_group("gloo")
rank = torch.tensor([distributed.get_rank()])
distributed.all_reduce(rank)
print(f"rank {distributed.get_rank()} of {distributed.get_world_size()}: sum {rank.item()}", flush=True)
distributed.destroy_process_group()
