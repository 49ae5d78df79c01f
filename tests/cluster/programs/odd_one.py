"""Rank 0 fails when there is the file FAIL; all others sleep, the last one elsewhere."""

import os
import sys
import time
from pathlib import Path


def step() -> None:
    time.sleep(1000)


def load() -> None:
    time.sleep(1000)


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    print("up", flush=True)
    while rank == 0 and not Path(os.environ["FAIL"]).exists():
        time.sleep(0.05)
    if rank == 0:
        sys.exit(5)
    if rank == size - 1:
        load()
    step()


main()
