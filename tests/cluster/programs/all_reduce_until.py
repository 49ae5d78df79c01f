"""An unmodified env:// script: all_reduce after all_reduce, until a file named `stop` is in one rank's home.

It tells of the first one done, as JSON: when (seconds of CLOCK_MONOTONIC), by whom, and in which round: a
number that rank 0 draws.
"""

import json
import os
import random
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
stop = Path.home() / "stop"
rank, size = dist.get_rank(), dist.get_world_size()
drawn = 0 if rank else random.getrandbits(50)
told = False
while True:
    flags = torch.tensor([1.0, float(stop.exists()), drawn], dtype=torch.float64)
    dist.all_reduce(flags)
    if not told:
        told = True
        assert flags[0].item() == size
        seen = {"at": time.monotonic(), "host": socket.gethostname(), "pid": os.getpid()}
        print(json.dumps({**seen, "rank": rank, "size": size, "round": int(flags[2])}), flush=True)
    if flags[1].item():
        break
    time.sleep(0.02)
dist.destroy_process_group()
