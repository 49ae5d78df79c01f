"""Finds its place by Slurm's variables, as Lightning, JAX and submitit do, and meets the other tasks at the first one's port."""

import os
import re
import socket
import time

JOB = int(os.environ["SLURM_JOB_ID"])
RANK, LOCAL, NODE, SIZE = (
    int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "LOCALID", "NODEID", "NTASKS")
)
assert int(os.environ["SLURM_STEP_NUM_TASKS"]) == SIZE
assert "SLURM_JOB_NAME" in os.environ
assert os.environ["SLURM_JOB_NAME"] not in ("bash", "interactive")
# The first host of the list, also in Slurm's short form.
first = re.split(r",(?![^\[]*\])", os.environ["SLURM_STEP_NODELIST"])[0]
first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
port = JOB % 4096 + 61440

if RANK == 0:
    with socket.create_server(("", port)) as server:
        peers = [server.accept()[0] for _ in range(SIZE - 1)]
        ranks = sorted(int(peer.recv(20)) for peer in peers)
        assert ranks == list(range(1, SIZE)), ranks
        for peer in peers:
            peer.send(b"go")
else:
    deadline = time.monotonic() + 60
    while True:
        try:
            link = socket.create_connection((first, port))
            break
        except OSError:
            assert time.monotonic() < deadline, f"nobody at {first}"
            time.sleep(0.05)
    link.send(str(RANK).encode())
    assert link.recv(2) == b"go"
print(
    f"task {RANK} of {SIZE}, local {LOCAL}, node {NODE} on {os.environ['SLURMD_NODENAME']} met all",
    flush=True,
)
