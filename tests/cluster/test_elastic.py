"""Elastic jobs on real hosts: whatever happens to hosts and workers, the training goes on, and ends right.

Each scenario runs with workers that stay (hvlaunch.torch.elastic) and with workers that are started anew.
"""

import sys
from collections.abc import Iterator

import pytest

from tests.cluster.elastic_jobs import LEASE, LIMIT, ElasticJob, Work
from tests.cluster.testhosts import TestHosts, wait_until

pytestmark = pytest.mark.timeout(300)

SUMS, TRAINING = (
    [Work(program, sys.executable, restarts=restarts) for restarts in (False, True)]
    for program in ("elastic_sums.py", "elastic_training.py")
)
LONG = [
    pytest.param(
        work, marks=[pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group(f"torch {work}")]
    )
    for work in TRAINING
]


class Starter:
    """Starts jobs: start(pool, *options)."""

    def __init__(self, cluster: TestHosts, work: Work) -> None:
        self.cluster = cluster
        self.work = work
        self.jobs: list[ElasticJob] = []

    def __call__(self, pool: str, *options: object) -> ElasticJob:
        self.jobs.append(ElasticJob(self.cluster, self.work, pool, *options))
        return self.jobs[-1]


@pytest.fixture(params=[*SUMS, *LONG], ids=str)
def start(request: pytest.FixtureRequest, cluster: TestHosts) -> Iterator[Starter]:
    starter = Starter(cluster, request.param)
    yield starter
    for job in starter.jobs:
        job.close()


def test_the_pool_changes(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1)
    first = job.goes_on_with("a:1,b:1")
    assert first == 0

    job.pool("a:1,b:1,c:1")
    job.goes_on_with("a:1,b:1,c:1")
    job.pool("a:2,b:1,c:1")
    job.goes_on_with("a:2,b:1,c:1")
    job.pool("a:1,b:1,c:1")
    job.goes_on_with("a:1,b:1,c:1")
    job.pool("a:1,c:1")
    job.goes_on_with("a:1,c:1")
    end = job.event("worker_exited", host="b")
    assert end["code"] == 0 or job.work in TRAINING  # it was told to: training is not done for that
    wait_until(lambda: not job.left_on("b"), "nothing is left on b")
    job.pool("a:1,b:2")  # two changes at once
    job.goes_on_with("a:1,b:2")
    wait_until(lambda: not job.left_on("c"), "nothing is left on c")

    # none of it was a failure
    assert not job.events("round_broken")
    report = job.finish()
    assert report["step"] > 0
    changes = job.events("round_changing")
    assert bool(changes) != job.work.restarts


def test_workers_fail_one_by_one(start: Starter) -> None:
    job = start("a:1,b:1,c:1", "--min-np", 2, "--worker-timeout", 5)
    number = job.goes_on_with("a:1,b:1,c:1")
    job.signal("KILL", "b")
    assert job.event("worker_exited", host="b", signal="SIGKILL")
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    job.order("c.0", "step raise")
    assert job.event("worker_exited", host="c", code=1)
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    job.signal("STOP", "a")  # rank 0
    assert job.said("rank 0 on host a is (stopped|silent for 5 s): it is killed")
    job.goes_on_with("a:1,b:1,c:1", after=number)
    report = job.finish()
    assert report["rounds"][0][1:] == [0, 3]
    assert not any("left alone" in event["text"] for event in job.events("message"))


def test_hosts_fail_one_by_one(start: Starter, cluster: TestHosts) -> None:
    everywhere = "a:1,b:1,c:1,d:1"
    job = start(everywhere, "--min-np", 1, "--blacklist-cooldown-range", 0.5, 1)
    number = job.goes_on_with(everywhere)
    job.kill_agent("b")
    assert "SIGKILL" in job.event("host_lost", host="b")["cause"]
    number = job.goes_on_with(everywhere, after=number)

    cluster["c"].kill()
    assert job.event("host_lost", host="c")
    number = job.goes_on_with("a:1,b:1,d:1", after=number)
    cluster["c"].restore()
    number = job.goes_on_with(everywhere, after=number)

    cluster["d"].cut()
    assert f"silent for {LEASE} s" in job.event("host_lost", host="d")["cause"]
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    wait_until(lambda: not job.left_on("d"), "nothing is left on d, which nobody reaches")
    cluster["d"].heal()
    number = job.goes_on_with(everywhere, after=number)

    begun = job.place(number)
    assert begun.total() == 4
    cluster["a"].kill()  # rank 0's
    assert job.event("host_lost", host="a")
    number = job.goes_on_with("b:1,c:1,d:1", after=number)

    for name in "cd":
        cluster[name].kill()
    number = job.goes_on_with("b:1", after=number)
    report = job.finish()
    assert report["rounds"][-1][2] == 1


def test_changes_while_a_round_is_being_placed(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1)
    number = job.goes_on_with("a:1,b:1")
    job.order("all", "join hold")
    job.pool("a:1,b:1,c:1")
    job.until(lambda: job.place(number + 1).total() == 3, "the next round is placed")
    job.saw("held", 3)
    job.pool("b:1,c:1,d:1")
    job.event("hosts_discovered", hosts=[{"host": name, "slots": 1} for name in "bcd"])
    job.withdraw("all")
    number = job.goes_on_with("b:1,c:1,d:1", after=number)

    held = job.stdout.count("held")
    job.order("all", "join hold")
    job.pool("b:1,c:1")
    job.until(lambda: job.place(number + 1).total() == 2, "the next round is placed")
    job.saw("held", held + 2)
    job.signal("KILL", "b")
    assert job.event("worker_exited", host="b", signal="SIGKILL")
    job.withdraw("all")
    job.goes_on_with("b:1,c:1", after=number)
    job.finish()


def test_discovery_flaps_fails_and_is_empty(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1)
    job.goes_on_with("a:1,b:1")
    pools = ["a:1,b:1,c:1", "a:1,b:1", "b:1,a:1,c:1", "a:1", "a:1,b:1,c:1", "c:1,b:1,a:1"]
    for pool in pools:
        job.pool(pool)
        names = [one[0] for one in pool.split(",")]
        job.event("hosts_discovered", hosts=[{"host": name, "slots": 1} for name in names])
    number = job.goes_on_with("a:1,b:1,c:1")
    job.pool("")
    assert job.said("the pool is empty now")
    (job.directory / "pool").unlink()
    assert "cat: " in job.said("the hosts of the last answer are used on")
    job.advances()
    assert job.round == number
    job.pool("a:1,b:1")
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()
    assert not job.events("round_broken")


def test_too_few_slots_healed_in_time(start: Starter, cluster: TestHosts) -> None:
    job = start("a:1,b:1", "--min-np", 2, "--blacklist-cooldown-range", 0.5, 1)
    number = job.goes_on_with("a:1,b:1")
    cluster["b"].kill()
    assert job.said("waiting for 2 slots .--min-np.")
    assert job.round == number
    cluster["b"].restore()
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()


def test_too_few_slots_for_too_long(start: Starter) -> None:
    timeout = 20 if start.work in TRAINING else 1  # a new worker's import counts too
    job = start("a:1,b:1", "--min-np", 2, "--elastic-timeout", timeout)
    job.goes_on_with("a:1,b:1")
    job.kill_agent("b")
    assert job.code(LIMIT) == 75, job.stderr
    assert "2" in job.event("job_ended", error="NotEnoughSlotsInTime")["cause"]
    assert "left alone for good" in job.stderr


def test_all_workers_fail(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 2)
    number = job.goes_on_with("a:1,b:1")
    job.doom(number)
    number = job.goes_on_with("a:1,b:1", after=number)
    job.order("all", "step fail")
    assert job.code(LIMIT) == 1
    assert "5 times in a row the workers failed before they got anywhere" in job.stderr
    assert "the test wants worker" in job.stderr


def test_restarts_are_used_up(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1, "--max-restarts", 1)
    number = job.goes_on_with("a:1,b:1")
    job.signal("KILL", "b")
    number = job.goes_on_with("a:1,b:1", after=number)
    job.signal("KILL", "a")
    assert job.code(LIMIT) == 137, job.stderr
    assert "all 1 restarts are used up (--max-restarts)" in job.stderr
    ended = job.event("job_ended")
    assert (ended["exit_code"], ended["host"]) == (137, "a")


@pytest.mark.parametrize("point", ["start", "join"])
def test_a_host_that_always_fails(start: Starter, point: str) -> None:
    job = start("a:1,b:1,c:1", "--min-np", 1, "--blacklist-cooldown-range", 0.2, 60)
    job.order("b", f"{point} fail")
    for seconds in (0.2, 0.4, 0.8):
        assert job.said(f"host b is left alone for {seconds:g} s: its workers fail")
        job.goes_on_with("a:1,c:1")
    job.withdraw("b")
    job.goes_on_with("a:1,b:1,c:1")
    job.finish()


# The same with torch, once in each way: tests marked `long` do all of it


GOOD = 0.9  # of the test images


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("start", TRAINING[:1], ids=str, indirect=True)
def test_workers_that_stay(start: Starter, cluster: TestHosts) -> None:
    job = start("a:1,b:1", "--min-np", 1, "--worker-timeout", 5)
    number = job.goes_on_with("a:1,b:1")
    job.pool("a:1,b:1,c:1")
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    cluster["c"].kill()
    number = job.goes_on_with("a:1,b:1", after=number)
    job.order("a", "start hold")  # of the one that is to replace it
    job.signal("STOP", "a")
    number = job.goes_on_with("b:1", after=number)
    job.pool("b:1")
    report = job.finish()
    assert report["accuracy"] > GOOD
    assert [size for _, _, size in report["rounds"]] == [2, 3, 2, 1]


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("start", TRAINING[1:], ids=str, indirect=True)
def test_workers_that_are_started_anew(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1)
    number = job.goes_on_with("a:1,b:1")
    job.signal("KILL", "a")
    number = job.goes_on_with("a:1,b:1", after=number)
    job.pool("b:1")
    number = job.goes_on_with("b:1", after=number)
    report = job.finish()
    assert report["accuracy"] > GOOD
    assert [size for _, _, size in report["rounds"]] == [2, 2, 1]
