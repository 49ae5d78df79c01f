"""Bound workers on real hosts, over ssh: masks from the kernel, GPUs, and a second binder."""

import os
import re

import pytest

from hvlaunch.agent.workers.binding import ranges
from tests.cluster.jobs import Job
from tests.testhosts.hosts import TestHosts

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="it needs two processors")

SHOW = "import os; print('mask', sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)"


def masks(text: str) -> set[str]:
    return set(re.findall(r"mask (\[.*\]) ", text))


def test_masks_by_ssh_a_table_and_a_second_binder(cluster: TestHosts) -> None:
    everything = os.sched_getaffinity(0)
    script = f"{SHOW}; os.sched_setaffinity(0, {everything}); import time; time.sleep(600)"
    words = ["-H", "a:2,b:2", "--bind", "core", "--gpus-per-worker", 1, "-x", "CUDA_VISIBLE_DEVICES=5,3"]
    job = Job(cluster, [*words, "--verbose", "python3", "-c", script])
    job.saw("bindings (--bind core), from /proc:").saw("another program binds too: ")
    # Each look may come before or after a worker has bound itself again.
    again = rf"process \d+ \(\S+\) of rank \d on [ab] has processors {ranges(everything)}, and --bind gave \S+[,;]"
    assert re.search(again, job.stderr), job.stderr
    assert re.search(r"[ab,]+ +0 +\S+ +any +\d+ +5\n", job.stderr), job.stderr
    job.saw("mask ", 4)
    assert len(masks(job.stdout)) == 2
    assert len(re.findall(r"mask \[[^]]*\] 5\n", job.stdout)) == 2, job.stdout
    job.send(15)
    job.code()
