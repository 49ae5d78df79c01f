"""Workers that use the rendezvous while the driver is killed and another takes its place, directly and by relays."""

import json
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.jobs import PROGRAMS
from tests.cluster.test_relay import shut_out
from tests.cluster.test_sessions import LIMIT
from tests.cluster.test_successor import Succession
from tests.testhosts.hosts import TestHosts, wait_until

STEPS = 150


def has_counted(job: Succession, step: int) -> bool:
    return f" at {step}" in job.output


@pytest.mark.parametrize("kills", [1, 3])
def test_workers_count_on_across_drivers(cluster: TestHosts, tmp_path: Path, kills: int) -> None:
    command = [sys.executable, PROGRAMS / "count_at_rendezvous.py", STEPS]
    with shut_out(cluster, "a", "b"):
        job = Succession(cluster, tmp_path, command=command)
        for kill in range(kills):
            wait_until(partial(has_counted, job, 20 + 40 * kill), "so many steps", LIMIT)
            job.kill()
            job.succeed()
        assert job.code() == 0, job.process.stderr.read()  # type: ignore[union-attr]
    ways = re.findall(r"by https?://(\S+):", job.output)
    assert sorted(ways) == sorted(["127.0.0.1"] * 4 + [cluster.driver.address] * 4)
    sums = [int(number) for number in re.findall(r"sum (\d+) at", job.output)]
    assert sorted(sums) == list(range(1, 8 * STEPS + 1))
    assert "restart" not in job.output


def test_a_round_changes_while_no_driver_is_there(cluster: TestHosts, tmp_path: Path) -> None:
    """A worker fails; the others ask for their places, and what is at the rendezvous is what they make the next round of."""
    orders = Path(tempfile.mkdtemp(prefix="hvlaunch-elastic-", dir="/var/tmp"))
    (orders / "orders").mkdir()
    command = [sys.executable, PROGRAMS / "elastic_sums.py", orders]
    job = Succession(cluster, tmp_path, "--min-np", 7, command=command)
    job.first.saw("commit at step 12")
    job.kill()
    (orders / "orders" / "b.1").write_text("step raise")
    job.succeed()
    wait_until(lambda: re.search(r"round [1-9] has [78] at step", job.output), "another round", LIMIT)
    commits = job.output.count("commit")
    wait_until(lambda: job.output.count("commit") > commits + 3, "more commits", LIMIT)
    (orders / "end").touch()
    assert job.code() == 0, job.output
    [done] = re.findall(r"done (\{.*\})", job.output)
    report = json.loads(done)
    ends = [begin for _, begin, _ in report["rounds"][1:]] + [report["step"]]
    sizes = zip(report["rounds"], ends, strict=True)
    assert report["weight"] == sum((end - begin) * size for (_, begin, size), end in sizes)
    assert report["rounds"][0][:2] == [0, 0]
    shutil.rmtree(orders)
