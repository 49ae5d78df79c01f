"""Rank 1 fails as trainings on GPUs do."""

import sys

import torch
import torch.distributed as dist


def memory() -> None:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def ordinal() -> None:
    torch.ones(1, device="cuda:7")


def kernel() -> None:
    table = torch.zeros(4, device="cuda")
    print(table[torch.tensor([1 << 20], device="cuda")].item())


dist.init_process_group("nccl")
tensor = torch.ones(1024, device="cuda")
dist.all_reduce(tensor)
if dist.get_rank() == 1:
    {"memory": memory, "ordinal": ordinal, "kernel": kernel}[sys.argv[1]]()
while True:
    dist.all_reduce(tensor)
    tensor.mean().item()
