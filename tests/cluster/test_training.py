"""Real training on real hosts: unmodified scripts, Gloo, and the environment that they find."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import LIGHT, PROGRAMS, Job
from tests.testhosts.hosts import CHECKOUT, TestHosts

# One at a time: what has torch keeps the processors busy, and the other tests go on beside it.
TORCH = pytest.mark.xdist_group("torch")

DIGITS = [sys.executable, CHECKOUT / "examples" / "ddp_digits.py"]


def accuracy(output: str) -> float:
    found = re.findall(r"accuracy (0\.\d+|1\.0+)", output)
    assert found, output
    return float(found[-1])


@pytest.fixture(scope="session")
def alone() -> float:
    """The accuracy of one process without a launcher."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # two threads wait for each other for minutes when it is busy
        "PYTHONPATH": str(LIGHT),
    }
    run = subprocess.run(list(map(str, DIGITS)), capture_output=True, text=True, check=True, env=env)
    return accuracy(run.stdout)


@TORCH
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(["-np", 8, "-H", "a:2,b:2,c:2,d:2"], id="4 hosts, 2 slots each", marks=pytest.mark.long),
        pytest.param(["-np", 3, "-H", "a:1,b:2,c:2"], id="uneven slots, -np below them"),
    ],
)
def test_digits_are_learned_as_well_as_by_one_process(
    cluster: TestHosts, alone: float, hosts: list[object]
) -> None:
    job = Job(cluster, [*hosts, "-x", "OMP_NUM_THREADS=1", "-x", f"PYTHONPATH={LIGHT}", *DIGITS])
    assert job.code(timeout=240) == 0, job.stderr
    assert accuracy(job.stdout) > 0.95
    assert accuracy(job.stdout) == pytest.approx(alone, abs=0.01)
    assert job.stdout.count("accuracy 0.") >= 1


@TORCH
@pytest.mark.timeout(300)
def test_collectives_by_hostfile(cluster: TestHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "cluster"
    hostfile.write_text("# two dialects in one file\na slots=2\nb:1   # one only\nc slots=1 max_slots=4\n")
    job = Job(cluster, ["--hostfile", hostfile, sys.executable, PROGRAMS / "collectives.py"])
    assert job.code(timeout=240) == 0, job.stderr
    for rank, host in enumerate("aabc"):
        assert f"[{rank}]<stdout>: rank {rank} of 4 on {host} is right" in job.stdout


@TORCH
@pytest.mark.timeout(300)
def test_the_drivers_machine_as_one_of_the_hosts(cluster: TestHosts) -> None:
    job = Job(cluster, ["-H", "localhost:2,a:1,b:1", sys.executable, PROGRAMS / "collectives.py"])
    assert job.code(timeout=240) == 0, job.stderr
    assert job.stdout.count("is right") == 4


def dump(cluster: TestHosts, *arguments: object, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What each rank finds, in order of rank."""
    job = Job(cluster, [*arguments, sys.executable, PROGRAMS / "dump_env.py"], env)
    assert job.code() == 0, job.stderr
    lines = re.findall(r"^\[(\d+)\]<stdout>: (\{.*\})$", job.stdout, re.MULTILINE)
    return [found for _, found in sorted((int(rank), json.loads(line)) for rank, line in lines)]


def test_the_drivers_machine_has_no_more_of_its_environment_than_the_others(cluster: TestHosts) -> None:
    here = {
        "MINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "https_proxy": "http://me:x@p:1",
    }
    for found in dump(cluster, "-H", "localhost:1,a:1", env=here):
        env = found["env"]
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == here["PYTORCH_CUDA_ALLOC_CONF"]
        assert not {"MINE", "https_proxy"} & env.keys()
        assert env["HOME"]


SIZES = [("a", 2), ("b", 1), ("c", 3)]
EXPECTED = [  # host, rank, local_rank, local_size, cross_rank, cross_size, group_rank
    ("a", 0, 0, 2, 0, 3, 0),
    ("a", 1, 1, 2, 0, 2, 0),
    ("b", 2, 0, 1, 1, 3, 1),
    ("c", 3, 0, 3, 2, 3, 2),
    ("c", 4, 1, 3, 1, 2, 2),
    ("c", 5, 2, 3, 0, 1, 2),
]


def test_every_ranks_environment_is_as_the_table_says(cluster: TestHosts) -> None:
    found = dump(cluster, "-H", "a:2,b:1,c:3,d:4", "-np", 6)
    assert len(found) == 6
    master = {(one["env"]["MASTER_ADDR"], one["env"]["MASTER_PORT"]) for one in found}
    ((address, port),) = master
    assert address == cluster["a"].address
    assert 0 < int(port) < 65536
    assert len({one["env"]["HVLAUNCH_TOKEN"] for one in found}) == 1
    for row, one in zip(EXPECTED, found, strict=True):
        host, rank, local_rank, local_size, cross_rank, cross_size, group_rank = row
        env = one["env"]
        assert one["hostname"] == host
        for prefix in ("HVLAUNCH", "HOROVOD"):
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            values = [env[f"{prefix}_{name}"] for name in names]
            assert values == [str(v) for v in (rank, 6, local_rank, local_size, cross_rank, cross_size)]
        expected = {
            "HVLAUNCH_HOST": host,
            "HVLAUNCH_ADDRESS": cluster[host].address,
            "HVLAUNCH_HOSTS": ",".join(f"{name}={cluster[name].address}:{n}" for name, n in SIZES),
            "HVLAUNCH_ROUND": "0",
            "HVLAUNCH_WORKER": f"{host}/{local_rank}/0",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "RANK": rank,
            "WORLD_SIZE": 6,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local_size,
            "GROUP_RANK": group_rank,
            "GROUP_WORLD_SIZE": 3,
            "NODE_RANK": group_rank,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 6,
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": env["HVLAUNCH_JOB_ID"],
            "PYTHONUNBUFFERED": 1,
            "OMP_NUM_THREADS": max(1, 2 // local_size) if _cpus() == 2 else env["OMP_NUM_THREADS"],
        }
        assert {name: env.get(name) for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
            assert env[name] == "eth0"
        url = f"https://{cluster.driver.address}:{env['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        assert env["HVLAUNCH_RENDEZVOUS"] == url
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == cluster.driver.address
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/{local_rank}.0.error.json")


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def test_forwarded_and_withheld_variables(cluster: TestHosts, tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("FROM_FILE='a b'\nBOTH=file\n")
    env = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "3",
        "MINE": "no",
        "CHOSEN": "yes",
        "LC_ALL": "C.UTF-8",
    }
    options = ["-H", "a:1", "--env-file", file, "-x", "CHOSEN", "-x", "BOTH=x", "-x", "GLOO_SOCKET_IFNAME=lo"]
    (found,) = dump(cluster, *options, env=env)
    got = found["env"]
    assert (got["NCCL_DEBUG"], got["LC_ALL"], got["CHOSEN"], got["FROM_FILE"], got["BOTH"]) == (
        "INFO",
        "C.UTF-8",
        "yes",
        "a b",
        "x",
    )
    assert "MINE" not in got
    assert "CUDA_VISIBLE_DEVICES" not in got
    assert got["GLOO_SOCKET_IFNAME"] == "lo"
    assert got["NCCL_SOCKET_IFNAME"] == "lo"
    (everything,) = dump(cluster, "-H", "a:1", "--env", "all", env=env)
    assert everything["env"]["MINE"] == "no"
    assert "CUDA_VISIBLE_DEVICES" not in everything["env"]


def test_the_working_directory_is_the_drivers(cluster: TestHosts) -> None:
    (found,) = dump(cluster, "-H", "a:1", "--cwd", "/usr")
    assert found["cwd"] == found["env"]["PWD"] == "/usr"
    (found,) = dump(cluster, "-H", "a:1")
    assert found["cwd"] == str(cluster.driver.default_cwd())
