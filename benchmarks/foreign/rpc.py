"""torch.distributed.rpc, by MASTER_ADDR and MASTER_PORT."""

import os

import torch
from torch.distributed import rpc

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
answer = rpc.rpc_sync(f"worker{(rank + 1) % size}", torch.add, args=(torch.ones(2), rank))
assert answer.tolist() == [rank + 1.0] * 2
rpc.shutdown()
print("right", rank, flush=True)
