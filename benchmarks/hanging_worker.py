"""A training on CPUs that comes to stand still in one of several ways; it knows nothing of hvlaunch.

    python hanging_worker.py KIND CULPRIT FOLDER

The line at which the culprit stays has its kind behind a `# HERE:`. Other lines are where it would be right to be.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOR_EVER = 1_000_000
STEPS = 20
HANGS_AT = 5


class Endless(torch.utils.data.Dataset[None]):
    def __len__(self) -> int:
        return FOR_EVER

    def __getitem__(self, number: int) -> None:
        time.sleep(FOR_EVER)


def asleep() -> None:
    time.sleep(FOR_EVER)  # HERE: asleep


def skips_a_collective() -> None:
    dist.monitored_barrier()  # HERE: skips-a-collective


def other_collective() -> None:
    dist.broadcast(torch.ones(4), src=0)  # HERE: other-collective


def data_loader() -> None:
    loader = torch.utils.data.DataLoader(Endless(), num_workers=1)
    for _ in loader:  # HERE: data-loader
        pass


def fifo() -> None:
    path = Path(sys.argv[3]) / f"fifo{os.getpid()}"
    os.mkfifo(path)
    path.read_bytes()  # HERE: fifo


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HERE: stopped


def holds_the_gil() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER)  # HERE: holds-the-gil


def busy_loop() -> None:
    done = False
    while not done: pass  # fmt: skip  # noqa: E701  # HERE: busy-loop


def left_early() -> None:
    threading.Event().wait()  # HERE: left-early


def import_lock() -> None:
    folder = Path(sys.argv[3])
    (folder / "slow_module.py").write_text("import time\ntime.sleep(1_000_000)\n")
    sys.path.insert(0, str(folder))
    threading.Thread(target=__import__, args=["slow_module"], daemon=True).start()
    time.sleep(1)
    __import__("slow_module")  # HERE: import-lock


def half_open() -> None:
    """The network does this one, from outside."""


KINDS = {
    "asleep": asleep,
    "skips-a-collective": skips_a_collective,
    "other-collective": other_collective,
    "data-loader": data_loader,
    "fifo": fifo,
    "stopped": stopped,
    "holds-the-gil": holds_the_gil,
    "busy-loop": busy_loop,
    "half-open": half_open,
    "left-early": left_early,
    "import-lock": import_lock,
}


def train(kind: str, culprit: int) -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(1024)
    for step in range(FOR_EVER if kind == "half-open" else STEPS):
        if kind == "half-open":
            time.sleep(0.2)
        elif step == HANGS_AT and dist.get_rank() == culprit:
            KINDS[kind]()
        dist.all_reduce(tensor)  # HERE: half-open
        if dist.get_rank() == 0 and (step < HANGS_AT or kind == "half-open"):
            print("step", step, flush=True)
    dist.barrier()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
