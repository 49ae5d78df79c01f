"""Ray: rank 0 starts the head and runs the program, the other ranks are its nodes. With `--end-with-rank 0`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import ray

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
start = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--disable-usage-stats"]
if rank > 0:
    deadline = time.monotonic() + 60
    while subprocess.run([*start, f"--address={address}:{port}", "--block"], check=False).returncode:
        assert time.monotonic() < deadline, "there is no head"
        time.sleep(1)
    sys.exit()
subprocess.run([*start, "--head", f"--port={port}", "--include-dashboard=false"], check=True)
ray.init(address=f"{address}:{port}")
deadline = time.monotonic() + 90
while sum(node["Alive"] for node in ray.nodes()) < size:
    assert time.monotonic() < deadline, "not all nodes came"
    time.sleep(0.2)
assert ray.cluster_resources()["CPU"] == size
square = ray.remote(lambda number: number * number)
assert ray.get([square.remote(number) for number in range(4)]) == [0, 1, 4, 9]
ray.shutdown()
print("right", *range(size), flush=True)
