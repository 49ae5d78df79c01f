"""Strangers flood the rendezvous of an elastic job, from hosts that are not in it: its workers go on, and none is called silent.

benchmarks/strangers.py has the figures, and other floods.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.cluster.elastic_jobs import ElasticJob, Work
from tests.testhosts.hosts import TestHosts

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SUMS = Work("elastic_sums.py", sys.executable)
FLOOD = Path(__file__).resolve().parents[1] / "security" / "flood.py"
WORKER_TIMEOUT = 5
MOST_MEMORY = 300 << 20
STRANGERS = ("c", "d")


@contextmanager
def flood(cluster: TestHosts, kind: str, port: int, count: int) -> Iterator[None]:
    """While in the block, so many connections from each of two hosts."""
    target = f"{cluster.driver.address}:{port}"
    with ExitStack() as stack:
        for host in (cluster[name] for name in STRANGERS):
            words = [sys.executable, str(FLOOD), kind, target, str(count), host.address]
            process = host.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
        yield


@pytest.mark.parametrize(
    ("kind", "count"), [("pipeline", 500), ("half-open", 600), ("half", 600), ("drip", 300)]
)
def test_an_elastic_job_goes_on_in_a_flood(cluster: TestHosts, tmp_path: Path, kind: str, count: int) -> None:
    job = ElasticJob(
        cluster, SUMS, tmp_path / "events.jsonl", "a:1,b:1", "--min-np", 2, "--worker-timeout", WORKER_TIMEOUT
    )
    try:
        first = job.goes_on_with("a:1,b:1")
        port = listening(job.process.pid)
        driver = psutil.Process(job.process.pid)
        with flood(cluster, kind, port, count):
            began = time.monotonic()
            job.until(
                lambda: time.monotonic() > began + 2 * WORKER_TIMEOUT,
                "a worker would have been called silent",
            )
            job.advances()
            assert driver.memory_info().rss < MOST_MEMORY
        job.advances()
        assert job.round == first, job.stderr
        assert "silent" not in job.stderr
        job.finish()
    finally:
        job.close()


def listening(pid: int) -> int:
    """The port at which the driver can be reached by others."""
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        address, _, port = local.rpartition(":")
        if state == "0A" and address != "0100007F":
            return int(port, 16)
    raise AssertionError("the driver does not listen")
