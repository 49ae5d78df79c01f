"""Makes a group by NCCL in each of the ways that a script may choose, one after another, and uses it."""

import os

import torch
import torch.distributed as dist

import hvlaunch.torch as hvt

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def env() -> None:
    dist.init_process_group("nccl")


def scheme() -> None:
    dist.init_process_group("nccl", init_method="hvlaunch://")


def store() -> None:
    dist.init_process_group("nccl", store=hvt.HTTPStore(), rank=RANK, world_size=SIZE)


def eager() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    on_cpu = torch.tensor([RANK])
    dist.all_reduce(on_cpu)
    assert int(on_cpu) == sum(range(SIZE))


for way in (env, scheme, store, eager):
    way()
    total = torch.tensor([float(RANK)], device="cuda")
    dist.all_reduce(total)
    assert total.item() == sum(range(SIZE))
    dist.barrier()
    dist.destroy_process_group()
    print(f"{way.__name__} is right", flush=True)
