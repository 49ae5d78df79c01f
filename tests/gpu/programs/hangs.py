"""A training on GPUs that comes to stand still in one of several ways; it knows nothing of hvlaunch.

    python hangs.py KIND CULPRIT

The line at which the culprit stays has its kind behind a `# HERE:`.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

FOR_EVER = 1_000_000
HANGS_AT = 5


def asleep() -> None:
    time.sleep(FOR_EVER)  # HERE: asleep


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HERE: stopped


def left_early() -> None:
    threading.Event().wait()  # HERE: left-early


def skips() -> None:
    dist.barrier()  # HERE: skips


KINDS = {"asleep": asleep, "stopped": stopped, "left-early": left_early, "skips": skips}

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
tensor = torch.ones(1024, device="cuda")
for step in range(FOR_EVER):
    if step == HANGS_AT and dist.get_rank() == int(sys.argv[2]):
        KINDS[sys.argv[1]]()
    dist.all_reduce(tensor)
    loss = tensor.mean().item()
    if dist.get_rank() == 0 and step < HANGS_AT:
        print("step", step, loss, flush=True)
    if step > HANGS_AT:
        break
