"""Elastic jobs on real hosts: whatever happens to hosts and workers, the training goes on, and ends right.

Each scenario runs with workers that stay (hvlaunch.torch.elastic) and with workers that are started anew.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.elastic_jobs import LIMIT, ElasticJob, Work
from tests.testhosts.hosts import TestHosts, wait_until

pytestmark = pytest.mark.timeout(300)

SUMS, TRAINING = (
    [Work(program, sys.executable, restarts=restarts, trains=trains) for restarts in (False, True)]
    for program, trains in (("elastic_sums.py", False), ("elastic_training.py", True))
)
LONG = [
    pytest.param(
        work, marks=[pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group(f"torch {work}")]
    )
    for work in TRAINING
]

ONE_WAY = pytest.mark.parametrize(
    "start", [SUMS[0], pytest.param(SUMS[1], marks=pytest.mark.long), *LONG], indirect=True, ids=str
)
"""Of those that take longest, with workers that are started anew."""


class Starter:
    """Starts a job: start(pool, *options)."""

    def __init__(self, cluster: TestHosts, work: Work, events_file: Path) -> None:
        self.cluster = cluster
        self.work = work
        self.events_file = events_file
        self.job: ElasticJob | None = None

    def __call__(self, pool: str, *options: object, is_fixed: bool = False) -> ElasticJob:
        self.job = ElasticJob(self.cluster, self.work, self.events_file, pool, *options, is_fixed=is_fixed)
        return self.job


@pytest.fixture(params=[*SUMS, *LONG], ids=str)
def start(request: pytest.FixtureRequest, cluster: TestHosts, tmp_path: Path) -> Iterator[Starter]:
    """The event log stays where pytest keeps the files of tests, and is shown where the test fails."""
    starter = Starter(cluster, request.param, tmp_path / "events.jsonl")
    yield starter
    if starter.job is not None:
        starter.job.close()
        sys.stdout.write(f"{starter.job.stdout[-1000:]}\n{starter.job.log()}\n")


@ONE_WAY
def test_the_pool_changes(start: Starter, cluster: TestHosts) -> None:
    job = start("a:1,b:1", "--min-np", 1)
    first = job.goes_on_with("a:1,b:1")
    assert first == 0
    cluster["b"].cut()  # for less than the lease: no change
    job.stalls()
    cluster["b"].heal()
    job.advances()
    assert job.round == first
    assert len(job.events("worker_started")) == 2

    job.pool("a:1,b:1,c:1")
    job.goes_on_with("a:1,b:1,c:1")
    job.pool("a:2,b:1,c:1")
    job.goes_on_with("a:2,b:1,c:1")
    job.pool("a:1,b:1,c:1")
    job.goes_on_with("a:1,b:1,c:1")
    job.order("b", "step hold")
    job.saw("held", 1)
    job.from_now()
    job.pool("a:1,c:1")
    assert job.event("round_changing" if not job.work.restarts else "workers_stopping")
    job.withdraw("b")
    assert job.event("worker_exited", host="b", code=0)  # it was told to: training is not done for that
    job.goes_on_with("a:1,c:1")
    wait_until(lambda: not job.left_on("b"), "nothing is left on b")
    job.pool("a:1,b:2")  # two changes at once
    job.goes_on_with("a:1,b:2")
    wait_until(lambda: not job.left_on("c"), "nothing is left on c")

    job.order("b", "end hold")
    job.from_now()
    job.end()
    assert job.event("worker_exited", host="a", code=0)
    job.pool("a:1")  # while the last workers of b end
    job.event("hosts_discovered", hosts=[{"host": "a", "slots": 1}])
    job.withdraw("b")
    job.finish()
    for _ in range(2):
        assert job.event("worker_exited", host="b")["code"] == 0

    # none of it was a failure
    assert not job.events("round_broken", "host_lost")
    assert bool(job.events("round_changing")) != job.work.restarts


def test_a_cut_of_the_drivers_link_kills_no_worker_for_its_silence(
    start: Starter, cluster: TestHosts
) -> None:
    job = start("a:1,b:1", "--min-np", 1, "--lease", 12, "--worker-timeout", 4)
    first = job.goes_on_with("a:1,b:1")
    cluster.driver.cut()
    # Longer than a worker may be silent, and shorter than the lease: the length is what is tested.
    time.sleep(9.0)
    cluster.driver.heal()
    job.advances()
    assert job.round == first
    job.finish()
    assert not job.events("worker_killed", "round_broken", "host_lost")


def test_workers_fail_one_by_one(start: Starter) -> None:
    job = start("a:1,b:1,c:1", "--min-np", 2, "--worker-timeout", max(5, start.work.lease))
    number = job.goes_on_with("a:1,b:1,c:1")
    job.signal("KILL", "b")
    assert job.event("worker_exited", host="b", signal="SIGKILL")
    number = job.goes_on_with("a:1,b:1,c:1", after=number)
    # By restarts nothing is reported: a third failure within seconds would end the job.
    if not job.work.restarts:
        job.order("c.0", "step raise")
        assert job.event("worker_exited", host="c", code=1)
        number = job.goes_on_with("a:1,b:1,c:1", after=number)
    job.signal("STOP", "a")  # rank 0
    assert job.event("worker_killed")["reason"]["how"] in ("stopped", "silent")
    job.goes_on_with("a:1,b:1,c:1", after=number)
    report = job.finish()
    assert report["rounds"][0][1:] == [0, 3]
    assert not job.events("host_excluded")


@ONE_WAY
def test_hosts_fail_one_by_one(start: Starter, cluster: TestHosts) -> None:
    everywhere = "a:1,b:1,c:1,d:1"
    lease = start.work.lease
    job = start(everywhere, "--min-np", 1, "--lease", lease, "--blacklist-cooldown-range", 0.5, 1)
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
    assert f"silent for {lease} s" in job.event("host_lost", host="d")["cause"]
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


def test_two_hosts_that_never_reach_each_other(start: Starter, cluster: TestHosts) -> None:
    cluster["b"].part(cluster["c"])
    job = start("a:1,b:1,c:1,d:1", "--min-np", 1)
    other = left_over(job)
    job.goes_on_with(f"a:1,{other}:1,d:1")
    job.finish()
    assert left_over(job) == other


def left_over(job: ElasticJob) -> str:
    """Of the hosts b and c, which do not reach each other, one is excluded, and what hvlaunch says of it names both."""
    job.until(lambda: " is excluded" in job.stderr and job.events("host_excluded"), "one is excluded")
    (left_out,) = (event["host"] for event in job.events("host_excluded"))
    other = {"b": "c", "c": "b"}[left_out]
    (line,) = (line for line in job.stderr.splitlines() if f"host {left_out} is excluded" in line)
    assert f"can't connect to host {other} (tried " in line
    return other


@pytest.mark.parametrize("is_fixed", [False, True], ids=["script", "fixed"])
def test_the_drivers_own_link_is_away_for_longer_than_the_lease(
    start: Starter, cluster: TestHosts, is_fixed: bool
) -> None:
    job = start("a:1,b:1", "--min-np", 2, "--lease", start.work.lease, is_fixed=is_fixed)
    number = job.goes_on_with("a:1,b:1")
    cluster.driver.cut()
    job.until(lambda: len(job.events("host_lost")) == 2, "both hosts are lost")
    wait_until(lambda: not any(map(job.left_on, "ab")), "nothing is left on hosts that nobody reaches")
    cluster.driver.heal()
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()


@ONE_WAY
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


@ONE_WAY
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
    job.event("pool_empty", keeps_hosts=True)
    (job.directory / "pool").unlink()
    assert "cat: " in job.event("keeping_hosts")["cause"]
    job.advances()
    assert job.round == number
    job.pool("a:1,b:1")
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()
    assert not job.events("round_broken")


def test_too_few_slots_healed_in_time(start: Starter, cluster: TestHosts) -> None:
    cooldown = ("--blacklist-cooldown-range", 0.5, 1)
    job = start("a:1,b:1", "--min-np", 2, "--lease", start.work.lease, *cooldown)
    number = job.goes_on_with("a:1,b:1")
    cluster["b"].kill()
    job.event("slots_lacking", least=2)
    assert job.round == number
    cluster["b"].restore()
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()


def test_too_few_slots_for_too_long(start: Starter) -> None:
    timeout = 20 if start.work.trains else 1  # a new worker's import counts too
    cooldown = (
        "--blacklist-cooldown-range",
        "300",
        "300",
    )  # else b, which is needed, is tried again after 5 s
    job = start("a:1,b:1", "--min-np", 2, "--elastic-timeout", timeout, *cooldown)
    job.goes_on_with("a:1,b:1")
    job.kill_agent("b")
    assert job.code(LIMIT) == 75, job.stderr
    assert "2" in job.event("job_ended", error="NotEnoughSlotsInTime")["cause"]
    assert "host b is excluded for 300 s" in job.stderr


def test_all_workers_fail(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 2)
    number = job.goes_on_with("a:1,b:1")
    job.doom(number)
    job.goes_on_with("a:1,b:1", after=number)
    job.finish()


def test_all_workers_fail_again_and_again(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 2)
    job.goes_on_with("a:1,b:1")
    for host in "ab" if job.work.restarts else "":
        job.order(host, "start fail")  # before it imports anything: 15 s would count as having got somewhere
    job.order("all", "step fail")
    assert job.code(LIMIT) == 77
    assert "the workers failed 3 times in a row without progress" in job.stderr
    assert "the test wants worker" in job.stderr


def test_restarts_are_used_up(start: Starter) -> None:
    job = start("a:1,b:1", "--min-np", 1, "--max-restarts", 1)
    number = job.goes_on_with("a:1,b:1")
    job.signal("KILL", "b")
    number = job.goes_on_with("a:1,b:1", after=number)
    job.signal("KILL", "a")
    assert job.code(LIMIT) == 137, job.stderr
    assert "no restart is left (--max-restarts 1)" in job.stderr
    ended = job.event("job_ended")
    assert (ended["exit_code"], ended["host"]) == (137, "a")


# A worker that is started anew fails at one place as at the other: a minute each. tests/unit/gloo/test_host_memory.py has such a job.
@pytest.mark.parametrize(
    ("start", "point"),
    [
        *((SUMS[0], point) for point in ("start", "join")),
        *(
            pytest.param(work, point, marks=pytest.mark.long)
            for work in SUMS[1:]
            for point in ("start", "join")
        ),
        *(
            pytest.param(*work.values, point, marks=work.marks)
            for work in LONG
            for point in ("start", "join")
        ),
    ],
    indirect=["start"],
    ids=str,
)
def test_a_host_that_always_fails(start: Starter, point: str) -> None:
    job = start("a:1,b:1,c:1", "--min-np", 1, "--blacklist-cooldown-range", 0.2, 60)
    job.order("b", f"{point} fail")
    for seconds in (0.2, 0.4, 0.8):
        excluded = job.event("host_excluded", host="b", seconds=seconds)
        assert excluded["reason"]["kind"] == "workers_fail"
        job.goes_on_with("a:1,c:1")
    job.withdraw("b")
    job.goes_on_with("a:1,b:1,c:1")
    job.finish()


# The same with torch, once in each way: tests marked `long` do all of it


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("start", TRAINING[:1], ids=str, indirect=True)
def test_workers_that_stay(start: Starter, cluster: TestHosts) -> None:
    job = start("a:1,b:1", "--min-np", 1, "--lease", start.work.lease, "--worker-timeout", 10)
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
    assert [size for _, _, size in report["rounds"]] == [2, 3, 2, 1]


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("start", TRAINING[:1], ids=str, indirect=True)
def test_two_hosts_that_reach_each_other_no_more(start: Starter, cluster: TestHosts) -> None:
    """Gloo waits for ever; that nothing is committed tells that something is wrong."""
    job = start("a:1,b:1,c:1", "--min-np", 1, "--commit-timeout", 10)
    number = job.goes_on_with("a:1,b:1,c:1")
    cluster["b"].part(cluster["c"])
    other = left_over(job)
    job.goes_on_with(f"a:1,{other}:1", after=number)
    job.finish()
    assert left_over(job) == other


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
    assert [size for _, _, size in report["rounds"]] == [2, 2, 1]


def test_a_host_is_moved_for_maintenance_and_no_step_is_lost(cluster: TestHosts, tmp_path: Path) -> None:
    starter = Starter(cluster, SUMS[0], tmp_path / "events.jsonl")
    job = starter("a:1,b:1,c:1", "--min-np", 2, "--max-np", 2, is_fixed=True)
    try:
        job.goes_on_with("a:1,b:1")
        assert job.move("x") == (2, "host x is not moved: the job has no such host")
        assert job.move("c") == (2, "host c is not moved: no worker of the round runs there")
        code, text = job.move("a")
        assert (code, text.partition(" after ")[0]) == (0, "host a is free")
        number = job.goes_on_with("b:1,c:1")
        assert job.event("worker_exited", host="a", code=0)
        wait_until(lambda: not job.left_on("a"), "nothing is left on a")
        # The host comes back when it is asked for: as a spare it is out, and so the other one has nowhere to go.
        code, text = job.move("b", "a")
        assert (code, text) == (2, "host b is not moved: host a has no free slots for 1 worker")
        assert job.round == number
        job.finish()
        assert not job.events("round_broken", "host_excluded", "host_lost", "worker_killed")
        assert len(job.events("round_changing")) == 1
    finally:
        job.close()


def test_a_silent_host_is_set_aside_at_once_and_taken_in_again(cluster: TestHosts, tmp_path: Path) -> None:
    starter = Starter(cluster, SUMS[0], tmp_path / "events.jsonl")
    job = starter("a:1,b:1,c:1", "--min-np", 2, "--suspect-after", 1.5, "--lease", 30, is_fixed=True)
    try:
        job.goes_on_with("a:1,b:1,c:1")
        job.from_now()
        cluster["b"].cut()
        job.goes_on_with("a:1,c:1")
        assert job.event("host_set_aside", host="b")
        assert job.event("round_broken")["reason"]["kind"] == "host_silent"
        cluster["b"].heal()
        job.goes_on_with("a:1,b:1,c:1")
        assert job.event("host_taken_in", host="b")
        report = job.finish()
        # The worker of b is the same process as before, and nobody counts a failure.
        assert [size for _, _, size in report["rounds"]] == [3, 2, 3]
        assert len(job.events("worker_started")) == 3
        assert not job.events("host_excluded", "host_lost", "worker_killed")
    finally:
        cluster["b"].heal()
        job.close()


@pytest.mark.long
def test_a_host_set_aside_is_lost_at_the_end_of_its_lease(cluster: TestHosts, tmp_path: Path) -> None:
    starter = Starter(cluster, SUMS[0], tmp_path / "events.jsonl")
    job = starter("a:1,b:1,c:1", "--min-np", 2, "--suspect-after", 1, "--lease", 5, is_fixed=True)
    try:
        job.goes_on_with("a:1,b:1,c:1")
        cluster["b"].cut()
        number = job.goes_on_with("a:1,c:1")
        assert not job.events("host_lost")
        job.event("host_lost", host="b")
        job.advances()
        assert job.round == number
        job.finish()
    finally:
        cluster["b"].heal()
        job.close()
