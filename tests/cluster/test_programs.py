"""Programs other than torch's on real hosts, by presets: a stand-in for vLLM's server, and others where they are installed.

HVLAUNCH_PROGRAMS names the `bin` directory of an environment with jax, ray, distributed, torch, tensorflow-cpu and mlx[cpu].
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.jobs import HVLAUNCH, PROGRAMS, Job
from tests.testhosts.hosts import TestHosts

SERVER = [sys.executable, PROGRAMS / "serve.py", "MODEL", "--tensor-parallel-size", "24"]
BIN = os.environ.get("HVLAUNCH_PROGRAMS", "")
FIRST_FAILED = "rank 0 of 3 on host a failed first"


def kill(hosts: TestHosts, name: str, word: str) -> None:
    """Kill the oldest process on the host with this word in its command."""
    done = hosts[name].run(["pkill", "-9", "-o", "-f", word])
    assert done.returncode == 0, f"no {word} on {name}"


def test_a_server_is_ready_and_the_end_of_its_head_is_the_jobs(cluster: TestHosts, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    line = ["--for", "vllm", "-H", "a:8,b:8,c:8", "--grace", "2", "--job-name"]

    def wait_ready() -> int:
        env = {**cluster.driver.env, **state}
        return cluster.driver.run([*HVLAUNCH, "wait", "--ready", "served"], env=env, timeout=60).returncode

    job = Job(cluster, [*line, "served", *SERVER], env=state).saw("up at", 3)
    assert wait_ready() == 0
    ups = {text.rpartition(" ")[2] for text in job.stdout.splitlines() if "up at" in text}
    assert len(ups) == 3
    joined = next(text for text in job.stdout.splitlines() if "joined by" in text)
    assert sum(f"'{address}'" in joined for address in ups) == 2
    kill(cluster, "a", "serve.py MODEL")
    assert job.code() == 137
    assert FIRST_FAILED in job.stderr
    # Its port is the user's own, and another job's now. One of the others fails, and then the user stops it.
    other = Job(cluster, [*line, "served", "--ready-port", 8100, *SERVER, "--port", 8100], env=state)
    other.saw("joined by")
    assert wait_ready() == 0
    kill(cluster, "c", "serve.py MODEL")
    assert other.code() == 137
    assert "rank 2 of 3 on host c failed first" in other.stderr
    stopped = Job(cluster, [*line, "stopped", *SERVER], env=state).saw("joined by")
    assert stopped.interrupt().code() == 130


@pytest.fixture
def programs() -> Iterator[Path]:
    """A directory that every host sees."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.long
def test_llama_cpps_servers_are_reached_only_by_the_tunnel(cluster: TestHosts, programs: Path) -> None:
    server = programs / "ggml-rpc-server"
    server.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAMS / "rpc_server.py"} "$@"\n')
    server.chmod(0o755)
    env = {"PATH": f"{programs}:{cluster.driver.env['PATH']}"}
    words = [
        "--for",
        "llama-cpp",
        "-H",
        "a,b,c",
        "-x",
        "PATH",
        "--grace",
        "2",
        "--lease",
        "6",
        "--reconnect-timeout",
        "3",
    ]
    job = Job(cluster, [*words, sys.executable, PROGRAMS / "rpc_server.py", "--stay"], env=env)
    job.saw("right answers: 2 secrets: False")
    # Its port is open on 127.0.0.1 alone; the other one is the tunnel's.
    listening = cluster["b"].run(["ss", "-Hltnp"]).stdout.splitlines()
    serving = [text.split()[3] for text in listening if "python" in text]
    assert [address.rpartition(":")[0] for address in serving if "127.0.0.1" in address] == ["127.0.0.1"]
    cluster["b"].cut()
    code = job.code(60)
    assert code == 69, job.stderr
    assert "host b" in job.stderr
    for name in ("a", "c"):
        assert cluster[name].run(["pgrep", "-f", "rpc_server.py"]).stdout == ""


def program(hosts: TestHosts, name: str, script: Path, text: str) -> Job:
    """Start a script by the preset on three hosts, with the environment of HVLAUNCH_PROGRAMS."""
    if not BIN:
        pytest.skip("HVLAUNCH_PROGRAMS names no environment with the program")
    script.write_text(text)
    script.chmod(0o644)
    env = {"PATH": f"{BIN}:{hosts.driver.env['PATH']}", "JAX_PLATFORMS": "cpu"}
    words = ["--for", name, "-H", "a,b,c", "-x", "PATH", "-x", "JAX_PLATFORMS", "--grace", "5"]
    command = ["torchrun", "--nproc-per-node", "2"] if name == "torchrun" else ["python"]
    return Job(hosts, [*words, *command, script], env=env)


JAX = """
import jax
jax.distributed.initialize()
total = jax.pmap(lambda x: jax.lax.psum(x, "hosts"), axis_name="hosts")(jax.numpy.ones(1) * (1 + jax.process_index()))
print("sum", float(total[0]), "of", jax.process_count())
"""

RAY = """
import ray, time
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(logging_level="ERROR")
@ray.remote
def address():
    return ray.util.get_node_ip_address()
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
print("tasks on", len({*ray.get([address.options(scheduling_strategy=On(node, False)).remote() for node in nodes])}), flush=True)
time.sleep(WAIT)
"""

DASK = """
from distributed import Client
with Client() as client:
    print("tasks on", len(client.run(lambda: 1)))
"""

TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
"""

# MORE is "1" for a program that continues until it is stopped.
MLX = """
import itertools
import mlx.core as mx
group = mx.distributed.init()
for step in itertools.count(1):
    total = mx.distributed.all_sum(mx.array(1.0 + group.rank()))
    mx.eval(total)
    if step <= 1:
        print("sum", total.item(), "of", group.size(), flush=True)
    if not MORE:
        break
"""

TENSORFLOW = """
import itertools, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
@tf.function
def total():
    def add():
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(1.0 + rank))
    return strategy.run(add)
for step in itertools.count(1):
    value = float(strategy.experimental_local_results(total())[0])
    if step <= 1:
        print("sum", value, "of", strategy.num_replicas_in_sync, flush=True)
    if not MORE:
        break
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "text", "word", "times"),
    [
        ("jax", JAX, "sum 6.0 of 3", 3),
        ("ray", RAY.replace("WAIT", "0"), "tasks on 3", 1),
        ("dask", DASK, "tasks on 3", 1),
        ("torchrun", TORCH, "sum 6.0", 6),
        ("mlx", MLX.replace("MORE", "0"), "sum 6.0 of 3", 3),
        ("tensorflow", TENSORFLOW.replace("MORE", "0"), "sum 6.0 of 3", 3),
    ],
    ids=("jax", "ray", "dask", "torchrun", "mlx", "tensorflow"),
)
def test_a_program_works_on_three_hosts(
    cluster: TestHosts, programs: Path, name: str, text: str, word: str, times: int
) -> None:
    job = program(cluster, name, programs / "program.py", text).saw(word, times, timeout=240)
    assert job.code(120) == 0, job.stderr
    for host in cluster:
        assert host.run(["sh", "-c", "ls -d /tmp/ray /tmp/hvlaunch-*"]).stdout == ""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("host", "word", "message"),
    [("a", "gcs_server", FIRST_FAILED), ("b", "raylet/raylet", "of 3 on host b failed first")],
)
def test_a_killed_part_of_ray_ends_the_job(
    cluster: TestHosts, programs: Path, host: str, word: str, message: str
) -> None:
    job = program(cluster, "ray", programs / "program.py", RAY.replace("WAIT", "3600"))
    job.saw("tasks on 3", timeout=240)
    kill(cluster, host, word)
    assert job.code(60) == 1
    assert message in job.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "text"), [("mlx", MLX), ("tensorflow", TENSORFLOW)], ids=("mlx", "tensorflow")
)
@pytest.mark.parametrize(("rank", "host"), [(1, "b"), (2, "c")], ids=("b", "c"))
def test_a_killed_worker_in_a_collective_ends_the_job(
    cluster: TestHosts, programs: Path, name: str, text: str, rank: int, host: str
) -> None:
    script = programs / "program.py"
    job = program(cluster, name, script, text.replace("MORE", "1")).saw("sum 6.0 of 3", 3, timeout=240)
    kill(cluster, host, str(script))
    # The others fail too, when their neighbor is gone: the report names the cause. Some need the whole grace period of 5 s.
    assert job.code(30) == 137
    assert f"rank {rank} of 3 on host {host} failed first" in job.stderr
