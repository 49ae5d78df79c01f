"""What outlived.py trains: steps with Gloo, each checked by its value and printed, until DIR/end is there.

outlived_training.py DIR: the worker prints `began RANK`, `step RANK NUMBER VALUE` for each step, and `ended RANK STEPS`.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

PAUSE = 0.05


def main(end: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"began {rank}", flush=True)
    step = 0
    while True:
        numbers = torch.tensor([(rank + 1) * (step + 1), int(end.exists())])
        dist.all_reduce(numbers)
        value, is_over = numbers.tolist()
        assert value == size * (size + 1) // 2 * (step + 1), (step, value)
        print(f"step {rank} {step} {value}", flush=True)
        step += 1
        if is_over:
            break
        time.sleep(PAUSE)
    print(f"ended {rank} {step}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may crash Python's end, which is not what is tried here


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "end")
