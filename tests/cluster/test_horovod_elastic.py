"""An elastic script of Horovod's, whose import alone is changed, on real hosts: whatever happens to them, it trains on."""

import sys
from pathlib import Path

import pytest

from tests.cluster.elastic_jobs import ElasticJob, Work
from tests.testhosts.hosts import TestHosts

SCRIPT = Work("horovod_elastic.py", sys.executable)


@pytest.mark.long
@pytest.mark.xdist_group("torch")
@pytest.mark.timeout(300)
def test_it_survives_a_killed_worker_a_lost_host_and_an_added_one(cluster: TestHosts, tmp_path: Path) -> None:
    job = ElasticJob(cluster, SCRIPT, tmp_path / "events.jsonl", "a:1,b:1,c:1", "--min-np", 1, "--lease", 10)
    try:
        number = job.goes_on_with("a:1,b:1,c:1")
        job.signal("KILL", "a")
        assert job.event("worker_exited", host="a", signal="SIGKILL")
        number = job.goes_on_with("a:1,b:1,c:1", after=number)
        job.kill_agent("c")
        assert job.event("host_lost", host="c")
        number = job.goes_on_with("a:1,b:1", after=number)
        job.pool("a:1,b:1,d:2")
        job.goes_on_with("a:1,b:1,d:2", after=number)
        report = job.finish()
    finally:
        job.close()
        sys.stdout.write(job.log())
    assert report["alike"] == 1
    assert report["loss"] < 0.05
    assert report["rate"] == pytest.approx(4)
