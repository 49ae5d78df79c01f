"""A worker that prints nothing for a long time, and gets on all the same; its rank 0 says when it has done so.

    python busy_worker.py PHASE SECONDS FOLDER

Without torch's collectives the others could do something else: they wait for rank 0 in one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GIGABYTE = 1 << 30
SOURCE = "".join(
    f"double f{number}(double x) {{ double a[64]; for (int i = 0; i < 64; i++) a[i] = x / (i + {number + 1}); "
    "for (int k = 0; k < 99; k++) for (int i = 1; i < 63; i++) a[i] = a[i-1] * a[i+1] + a[i] / (k + 1.5); return a[7]; }\n"
    for number in range(400)
)


def compiling(folder: Path) -> None:
    """Processes that are no Python, for half a minute each."""
    (folder / "kernel.c").write_text(SOURCE)
    command = ["cc", "-O3", "-funroll-loops", "-c", "kernel.c", "-o", "kernel.o"]
    compilers = [subprocess.Popen(command, cwd=folder) for _ in range(2)]
    for compiler in compilers:
        compiler.wait()


def evaluating(_folder: Path) -> None:
    total = 0
    for number in range(3_000_000):
        total += number % 7
    (torch.rand(1500, 1500) @ torch.rand(1500, 1500)).sum().item()


def writing(folder: Path) -> None:
    """To a disk that takes 20 MB/s."""
    with (folder / "slow" / "checkpoint").open("wb") as file:
        for _ in range(16):
            file.write(bytes(GIGABYTE // 16))
        file.flush()
        os.fsync(file.fileno())


def computing(_folder: Path) -> None:
    """A library's one call, of many seconds."""
    torch.linalg.svd(torch.rand(1200, 1200))


def reading_stdin(_folder: Path) -> None:
    sys.stdin.readline()


PHASES: dict[str, Callable[[Path], None]] = {
    "compiling": compiling,
    "evaluating": evaluating,
    "slow-disk": writing,
    "computing": computing,
    "stdin": reading_stdin,
}


def main(phase: str, seconds: float, folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * seconds + 1800))
    torch.set_num_threads(1)
    everyone = phase == "computing"
    end = time.monotonic() + seconds
    if dist.get_rank() == 0:
        print("the phase begins", flush=True)
    while (dist.get_rank() == 0 or everyone) and time.monotonic() < end:
        PHASES[phase](folder)
    dist.barrier()
    if dist.get_rank() == 0:
        print("the phase is over", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
