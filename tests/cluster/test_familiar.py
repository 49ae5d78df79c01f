"""Command lines as users of other launchers type them, on real hosts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import PROGRAMS, Job
from tests.testhosts.hosts import TestHosts

TELL = (
    "import json, os; print(json.dumps([os.environ[name] for name in ('RANK', 'HVLAUNCH_HOST', 'LOCAL_RANK')] "
    "+ [os.environ.get('CUDA_VISIBLE_DEVICES')]))"
)


def told(cluster: TestHosts, *words: object) -> list[Any]:
    """Rank, host, local rank and GPUs of each worker, by rank."""
    job = Job(cluster, [*words, "--prefix", "", sys.executable, "-c", TELL])
    assert job.code(timeout=60) == 0, job.stderr
    rows = [json.loads(line) for line in job.stdout.splitlines()]
    return sorted([int(rank), host, int(local_rank), gpus] for rank, host, local_rank, gpus in rows)


@pytest.mark.xdist_group("torch")
@pytest.mark.timeout(300)
def test_ranks_by_turns_find_each_other(cluster: TestHosts) -> None:
    job = Job(
        cluster,
        ["-np", "4", "-H", "a:2,b:1,c:2", "--map-by", "node", sys.executable, PROGRAMS / "collectives.py"],
    )
    assert job.code(timeout=240) == 0, job.stderr
    for rank, host in enumerate("abca"):
        assert f"rank {rank} of 4 on {host} is right" in job.stdout


def test_torchruns_words(cluster: TestHosts, tmp_path: Path) -> None:
    words = ("--nnodes=2", "--nproc_per_node=2", "-H", "c,a,b")
    assert told(cluster, *words) == [
        [0, "c", 0, None],
        [1, "c", 1, None],
        [2, "a", 0, None],
        [3, "a", 1, None],
    ]
    job = Job(cluster, [*words, "--log-dir", tmp_path, "--redirects", "1", "-m", "this"])
    assert job.code(timeout=60) == 0, job.stderr
    assert job.stdout == ""
    for rank in range(4):
        text = (tmp_path / "latest" / f"rank.{rank}" / "stdout").read_text()
        assert text.startswith("The Zen of Python")


def test_deepspeeds_words(cluster: TestHosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\nc slots=4\n")
    found = told(cluster, "--hostfile", hostfile, "--include", "c:1,3@a")
    assert found == [[0, "a", 0, None], [1, "a", 1, None], [2, "c", 0, "1,3"], [3, "c", 1, "1,3"]]
    found = told(cluster, "--hostfile", hostfile, "--exclude", "b@c:0,1,2")
    assert found == [[0, "a", 0, None], [1, "a", 1, None], [2, "c", 0, "3"]]
