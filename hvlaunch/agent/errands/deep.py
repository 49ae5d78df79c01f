"""Runs small pieces of training on this host with the job's Python and torch: products of matrices, and sums over hosts.

The driver sends lines with runs, and gets a line with the results of each. A run has a number of processes on this host;
none stands for a single process that tries each device alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time

from hvlaunch.agent.errands import answer_lines, write_line
from hvlaunch.agent.facts import free_port
from hvlaunch.agent.quick import loads
from hvlaunch.agent.wire.frames import (
    PORT,
    exactly,
    flag,
    mapping,
    number,
    or_null,
    plain,
    record,
    several,
    text,
    whole,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Dict, List, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "OUTCOMES", "PORTS", "RESULT", "run"]

_PATH = text(4096, raw=True)
ARGUMENTS = record(
    {
        "program": _PATH,  # the job's Python
        "directory": _PATH,
        "env": mapping(text(1 << 16, raw=True), text(1 << 20, raw=True), 1 << 16),
    }
)
RESULT = record({})
PORTS = exactly(PORT, 3)
"""Free ports for the stores of three rounds."""
_MOST_DEVICES = 64
_SECONDS = number(0, 1 << 20)
OUTCOMES = several(
    record(
        {
            "error": or_null(text(500)),
            "gpus": whole(0, _MOST_DEVICES),
            "nccl": or_null(several(whole(0, 1 << 20), 4)),
            "matmul": several(_SECONDS, _MOST_DEVICES),  # of each device
            "sum": or_null(_SECONDS),  # of an all_reduce
            "wrong": flag,  # a result that is not right
            "notes": several(text(500), 16),  # of NCCL's own diagnostics
        }
    ),
    _MOST_DEVICES,
)
_EMPTY: Dict[str, Any] = {
    "error": None,
    "gpus": 0,
    "nccl": None,
    "matmul": [],
    "sum": None,
    "wrong": False,
    "notes": [],
}
_LONGEST_OUTPUT = 1 << 20
_MARK = "hvlaunch-deep "

# The factors are small whole numbers: every sum of their products is exact, whatever its order.
_PROGRAM = """
import datetime, json, os, sys, time
import torch
import torch.distributed as dist

def best(work, wait):
    times = []
    for number in range(6):
        wait()
        begin = time.monotonic()
        work()
        wait()
        times.append(time.monotonic() - begin)
    return min(times)

out = {"gpus": 0, "nccl": None, "matmul": [], "sum": None, "wrong": False}
is_cuda = torch.cuda.is_available()
if is_cuda:
    out["gpus"] = torch.cuda.device_count()
    out["nccl"] = list(torch.cuda.nccl.version())[:3]
size, rank, local = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
if size == 0:
    for number in range(out["gpus"] or 1):
        device = torch.device("cuda", number) if is_cuda else torch.device("cpu")
        wait = (lambda: torch.cuda.synchronize(device)) if is_cuda else (lambda: None)
        left, right = (torch.randint(-4, 5, (1024, 1024)) for _ in range(2))
        right_sum = left.sum(0).double() @ right.double()
        for _ in range(3):
            product = left.to(device, torch.float32) @ right.to(device, torch.float32)
            out["wrong"] |= not torch.equal(product.double().sum(0).cpu(), right_sum)
        count, kind = (8192, torch.float16) if is_cuda else (1024, torch.float32)
        matrix = torch.ones(count, count, device=device, dtype=kind)
        out["matmul"].append(best(lambda: matrix @ matrix, wait))
else:
    if is_cuda:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", timeout=datetime.timedelta(seconds=float(os.environ["DEEP_SECONDS"]))
    )
    device = torch.device("cuda", local) if is_cuda else torch.device("cpu")
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)
    length = (1 << 24) if is_cuda else (1 << 20)
    value = torch.full((length,), rank + 1.0, device=device)
    dist.all_reduce(value)
    out["wrong"] = not bool((value == size * (size + 1) / 2).all())
    value.zero_()
    out["sum"] = best(lambda: dist.all_reduce(value), wait)
    dist.destroy_process_group()
print("\\n%MARK%" + json.dumps(out), flush=True)
os._exit(0)
""".replace("%MARK%", _MARK)


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Carry out runs until the driver ends the input."""
    reserved = [free_port() for _ in range(3)]
    ports = [bound.getsockname()[1] for bound in reserved]
    for bound in reserved:
        bound.close()
    write_line(stream, ports)
    answer_lines(stream, lambda order: _run(arguments, order))
    return {}


def _run(arguments: Dict[str, Any], order: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Start the processes, and return their outcomes."""
    deadline = time.monotonic() + order["seconds"]
    started: List[Tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    for local in range(max(1, order["local"])):
        env = {
            **os.environ,
            **arguments["env"],
            **order["env"],
            "WORLD_SIZE": str(order["size"]),
            "RANK": str(order["rank"] + local),
            "LOCAL_RANK": str(local),
            # Long before the errand's own limit, so that the error has words.
            "DEEP_SECONDS": str(order["seconds"] / 2),
        }
        output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        try:
            process = subprocess.Popen(
                [arguments["program"], "-c", _PROGRAM],
                cwd=arguments["directory"] if os.path.isdir(arguments["directory"]) else "/",
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            output.close()
            return [{**_EMPTY, "error": plain("%s: %s" % (arguments["program"], error.strerror), 500)}]
        started.append((process, output))
    outcomes = []
    for process, output in started:
        with output:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
                late = ""
            except subprocess.TimeoutExpired:
                late = "no result within %.0f s" % order["seconds"]
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            outcomes.append(_outcome(output.read(_LONGEST_OUTPUT).decode("utf-8", "replace"), late))
    return outcomes


def _outcome(output: str, late: str) -> Dict[str, Any]:
    lines = output.splitlines()
    # NCCL tags a result that may require a look.
    notes = [plain(line.partition("NCCL DIAG ")[2], 500) for line in lines if "NCCL DIAG [INFO]" in line][:16]
    for line in reversed(lines):
        if line.startswith(_MARK):
            try:
                outcome: Dict[str, Any] = {**_EMPTY, **loads(line[len(_MARK) :]), "notes": notes}
            except ValueError:
                break
            return outcome
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return {**_EMPTY, "error": plain(late or last.strip(), 500), "notes": notes}
