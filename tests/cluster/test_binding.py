"""Bound workers on real hosts: masks from the kernel, over ssh and after an elastic round."""

import os
import re
from pathlib import Path

import pytest

from tests.cluster.jobs import Job
from tests.testhosts.hosts import TestHosts

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="they need two processors")

SHOW = "import os; print('mask', sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)"


def masks(text: str) -> set[str]:
    return set(re.findall(r"mask (\[.*\]) ", text))


def test_masks_by_ssh_a_table_and_a_second_binder(cluster: TestHosts) -> None:
    script = f"{SHOW}; os.sched_setaffinity(0, {{0, 1}}); import time; time.sleep(600)"
    words = ["-H", "a:2,b:2", "--bind", "core", "--gpus-per-worker", 1, "-x", "CUDA_VISIBLE_DEVICES=5,3"]
    job = Job(cluster, [*words, "--verbose", "python3", "-c", script])
    job.saw("another program binds too: ")
    job.saw("rank 0 on a has processors 0-1, and --bind gave 0")
    job.saw("bindings (--bind core), from /proc:")
    # Equal hosts share a row. The worker has bound itself again before the table, which shows what is true.
    assert re.search(r"a,b +0 +0-1 +any +1 +5\n", job.stderr), job.stderr
    assert len(masks(job.stdout)) == 2
    assert len(re.findall(r"mask \[.\] 5\n", job.stdout)) == 2, job.stdout
    job.send(15)
    job.code()


def test_a_replaced_worker_has_the_processors_of_its_slot(cluster: TestHosts, tmp_path: Path) -> None:
    script = (
        f"{SHOW}; import sys; sys.exit(os.environ['HVLAUNCH_ROUND'] == '0' and os.environ['RANK'] == '1')"
    )
    words = ["-H", "a:2", "-np", 2, "--max-restarts", 1, "--bind", "core", "--verbose"]
    job = Job(cluster, [*words, "python3", "-c", script])
    assert job.code() == 0, job.stderr
    seen = re.findall(r"\[(\d)\].*mask (\[.*\]) ", job.stdout)
    assert len(seen) >= 3
    assert len(set(seen)) == 2, job.stdout
