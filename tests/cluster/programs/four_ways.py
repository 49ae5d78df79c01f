"""Makes a group in each of the ways that a script may choose, one after another, and uses it."""

import os

import torch
import torch.distributed as dist

import hvlaunch.torch as hvt

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK, LOCAL_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def total(group: dist.ProcessGroup | None = None) -> int:
    ranks = torch.tensor([RANK])
    dist.all_reduce(ranks, group=group)
    return int(ranks)


def check() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    assert total() == sum(range(SIZE))
    told = torch.tensor([float(RANK)])
    dist.broadcast(told, src=SIZE - 1)
    assert told.item() == SIZE - 1
    odd = list(range(1, SIZE, 2))
    group = dist.new_group(odd)
    assert RANK not in odd or total(group) == sum(odd)
    dist.barrier()


def env() -> None:
    dist.init_process_group("gloo")
    check()
    dist.destroy_process_group()


def init() -> None:
    for _ in range(2):  # a process may live through several rounds
        hvt.init(timeout=120)
        assert (hvt.rank(), hvt.size(), hvt.local_rank(), hvt.local_size()) == (
            RANK,
            SIZE,
            LOCAL_RANK,
            LOCAL_SIZE,
        )
        assert hvt.cross_rank() == int(os.environ["HVLAUNCH_CROSS_RANK"])
        assert hvt.cross_size() == int(os.environ["HVLAUNCH_CROSS_SIZE"])
        first = RANK - LOCAL_RANK
        assert total(hvt.local_group()) == sum(range(first, first + LOCAL_SIZE))
        assert total(hvt.cross_group()) == sum(range(LOCAL_RANK, SIZE, LOCAL_SIZE))
        check()
        hvt.shutdown()


def scheme() -> None:
    dist.init_process_group("gloo", init_method="hvlaunch://")
    check()
    dist.destroy_process_group()


def store() -> None:
    dist.init_process_group("gloo", store=hvt.HTTPStore(), rank=RANK, world_size=SIZE)
    check()
    dist.destroy_process_group()


for way in (env, init, scheme, store):
    way()
    print(f"{way.__name__} is right", flush=True)
