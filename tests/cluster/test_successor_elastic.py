"""Elastic jobs whose driver is killed while hosts and workers come and go: the training goes on, and ends right."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.elastic_jobs import ElasticJob, Work
from tests.cluster.heirs import Heir
from tests.cluster.test_elastic import SUMS
from tests.testhosts.hosts import TestHosts

pytestmark = pytest.mark.timeout(300)
MOMENTS = 0.6
"""Seconds after a cause, in which a round is changed."""


class Inherited(ElasticJob):
    """An elastic job whose driver is replaced. `stdout` has what all of its drivers have printed or kept."""

    heir: Heir

    def inherit(self, cause: Callable[[], object], after: float) -> None:
        """Kill the driver so long after the cause; another takes the job over."""
        self.heir = Heir(self.hosts, self.process)
        cause()
        time.sleep(after)
        self.heir.kill()
        for reader in self._readers:
            reader.join()
        before = self.stdout
        self.process = self.heir.succeed()

        def look() -> None:
            while self.process.poll() is None:
                self.stdout = before + self.heir.stored
                time.sleep(0.05)
            self.stdout = before + self.heir.stored

        self._readers = [threading.Thread(target=look, daemon=True)]
        self._readers[0].start()

    def is_right(self) -> None:
        """No worker was started twice, and the driver has said nothing that it had to take back."""
        started = [(event["host"], event["slot"], event["start"]) for event in self.events("worker_started")]
        assert len(started) == len(set(started)), started
        assert not self.events("thread_failed")


@pytest.fixture(params=SUMS, ids=str)
def start(
    request: pytest.FixtureRequest, cluster: TestHosts, tmp_path: Path
) -> Iterator[Callable[..., Inherited]]:
    jobs: list[Inherited] = []

    def begin(pool: str, *options: object) -> Inherited:
        work: Work = request.param
        jobs.append(
            Inherited(
                cluster, work, tmp_path / "events", pool, "--reconnect-timeout", 20, "--lease", 20, *options
            )
        )
        return jobs[0]

    yield begin
    for job in jobs:
        job.close()
        sys.stdout.write(f"{job.stdout[-1000:]}\n{job.log()}\n")


def moments(count: int) -> list[object]:
    """Random ones; the last is marked `long`: the simulator kills drivers at thousands of others."""
    chance = random.Random(count)
    *first, last = [chance.uniform(0.0, MOMENTS) for _ in range(count)]
    return [*first, pytest.param(last, marks=pytest.mark.long)]


@pytest.mark.parametrize("after", moments(3))
def test_in_the_middle_of_a_round_change(start: Callable[..., Inherited], after: float) -> None:
    job = start("a:2,b:1", "--min-np", 1)
    job.goes_on_with("a:2,b:1")
    job.inherit(lambda: job.pool("a:2,b:1,c:2"), after)
    job.goes_on_with("a:2,b:1,c:2")
    job.finish()
    job.is_right()


@pytest.mark.parametrize("after", moments(2))
def test_with_a_spare_that_is_needed(
    start: Callable[..., Inherited], cluster: TestHosts, after: float
) -> None:
    job = start("a:1,b:1,c:1", "--min-np", 1, "--max-np", 2)
    job.goes_on_with("a:1,b:1")
    job.inherit(lambda: job.kill_agent("b"), after)
    job.goes_on_with("a:1,c:1")
    job.finish()
    job.is_right()


@pytest.mark.parametrize("after", [0.0, *moments(2)])
def test_with_a_host_that_is_lost_in_the_same_second(start: Callable[..., Inherited], after: float) -> None:
    job = start("a:2,b:1,c:1", "--min-np", 1)
    job.goes_on_with("a:2,b:1,c:1")
    job.inherit(lambda: job.kill_agent("b"), after)
    job.goes_on_with("a:2,c:1", after=0)
    job.finish()
    job.is_right()
