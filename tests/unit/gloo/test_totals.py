"""The totals of a job, by histories of its engine."""

from typing import Any

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import DecidedTurn, decode
from hvlaunch.job import JobResult
from hvlaunch.watch.overview import BOUNDS, Totals
from tests.unit.gloo.elastic_history import arrive, elastic, everyone, pool, training
from tests.unit.gloo.history import History, hosts, lost, spec


def totals(job: History, *more: tuple[on.Event, float]) -> dict[str, Any]:
    """Return the totals after the history and further events."""
    found = Totals()
    for entry in job.journal[1:]:
        turn = decode(DecidedTurn, entry)
        found.watch(turn.event, turn.actions, turn.at)
    for event, at in more:
        found.watch(event, [], at)
    return {**found.at(job.now)}


def run(job: History, number: int) -> None:
    """Let every worker of the round run."""
    for start in [one for one in job.of(do.Start) if one.round == number]:
        for slot, began, _, _ in start.launches:
            job.play(on.WorkerStarted(start.host, number, slot, 1, began))


def meet(job: History, number: int, commit: int) -> None:
    """Let the workers meet in this round, with this commit."""
    for host, slot in everyone(job):
        job.play(on.WorkerBeat(host, slot, job.born(host, slot)[1], commit, round=number))


@pytest.fixture
def unmodified():
    """A static job whose workers were started for 5 seconds and have run for 30."""
    job = elastic("a:2,b:2")
    arrive(job, "a", "b")
    job.now += 5.0
    run(job, 0)
    job.now += 30.0
    return job


def test_before_anything_is_known():
    assert Totals().at(7.0)["seconds"] == 0.0


def test_time_is_useful_while_all_workers_run(unmodified):
    found = totals(unmodified)
    assert (found["rounds"], found["useful_seconds"], found["seconds"]) == (1, 30.0, 35.0)
    assert (found["restarts"], found["lost_hosts"], sum(found["recoveries"]["counts"])) == (0, 0, 0)
    assert found["failures"] == 0


def test_a_failure_ends_it_until_all_workers_of_the_next_round_run(unmodified):
    job = unmodified
    job.exit("a", 0, code=1)
    job.now += 3.0
    assert totals(job)["useful_seconds"] == 30.0
    for host, slot in everyone(job):
        job.exit(host, slot, code=None, signal=15)
    while len({one.round for one in job.of(do.Start)}) == 1:
        job.wait()
    began = job.now
    job.now += 4.0
    run(job, 1)
    found = totals(job)
    recovery = began + 4.0 - 135.0
    assert (found["rounds"], found["restarts"], found["useful_seconds"]) == (2, 1, 30.0)
    # The workers that were stopped for the first failure are none of their own.
    assert found["failures"] == 1
    assert found["recoveries"]["seconds"] == pytest.approx(recovery)
    (bucket,) = [at for at, count in enumerate(found["recoveries"]["counts"]) if count]
    assert BOUNDS[bucket - 1] < recovery <= BOUNDS[bucket]
    job.now += 10.0
    assert totals(job)["useful_seconds"] == 40.0


def test_a_host_that_is_lost_counts(unmodified):
    unmodified.play(lost("b"))
    unmodified.now += 50.0
    found = totals(unmodified)
    assert (found["lost_hosts"], found["useful_seconds"]) == (1, 30.0)


def test_with_commits_only_committed_time_is_useful():
    job = training()  # they have told of commit 5
    meet(job, 0, 5)
    job.now += 20.0
    assert totals(job)["useful_seconds"] == 0.0
    meet(job, 0, 6)
    job.now += 7.0
    assert totals(job)["useful_seconds"] == 20.0
    job.exit("a", 0, code=1)  # seven seconds in vain
    assert totals(job)["useful_seconds"] == 20.0


def test_a_round_that_ends_for_the_pool_is_no_failure():
    job = pool("a:2,b:2")
    meet(job, 0, 5)
    job.now += 20.0
    meet(job, 0, 6)
    job.play(on.HostsDiscovered(hosts("a:2")))
    assert job.of(do.Change)
    job.now += 5.0
    meet(job, 0, 7)
    found = totals(job)
    assert (found["restarts"], found["failures"], found["useful_seconds"]) == (0, 0, 25.0)


def test_compacted_beats_keep_the_useful_time():
    job = training()
    meet(job, 0, 5)
    live, begun = job.now, len(job.journal)
    for commit in (6, 7, 8):
        job.now += 10.0
        meet(job, 0, commit)
    whole = totals(job)
    assert whole["useful_seconds"] == 30.0
    del job.journal[begun:]
    assert totals(job, (on.Lull(commit=8, commit_at=live + 30.0), live + 31.0)) == whole


def parts(job: History, *more: tuple[on.Event, float]) -> dict[str, Any]:
    """Return the parts of the time that are not 0; they must be all of it."""
    found = totals(job, *more)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    return {name: pytest.approx(seconds) for name, seconds in found["parts"].items() if seconds}


def test_the_parts_of_the_time_are_all_of_it(unmodified):
    job = unmodified
    assert parts(job) == {"start": 5.0, "training": 30.0}
    job.exit("a", 0, code=1)
    job.now += 3.0
    assert parts(job) == {"start": 5.0, "training": 30.0, "recovery": 3.0}
    job.play(on.Interrupted(2))
    job.now += 4.0
    assert parts(job) == {"start": 5.0, "training": 30.0, "recovery": 3.0, "end": 4.0}


def test_a_job_that_failed_for_good_has_an_end_and_no_recovery():
    job = History(spec("a:1,b:1"))
    job.play(on.Began())
    arrive(job, "a", "b")
    for start in job.of(do.Start):
        for slot, began, _, _ in start.launches:
            job.play(on.WorkerStarted(start.host, start.round, slot, 1, began))
    job.now += 20.0
    job.exit("a", 0, code=1)
    job.now += 2.0
    job.exit("b", 0, code=None, signal=15)
    job.now += 1.0
    for host in "ab":
        job.play(on.HostClosed(host, 0))
    assert job.of(do.Finish)
    assert parts(job) == {"training": 20.0, "end": 3.0}


def test_a_step_ends_the_start(unmodified):
    """Until the first step, workers load their data and models."""
    job = unmodified
    assert not totals(job)["has_steps"]
    job.play(on.StepReached(0, 1))
    job.now += 8.0
    assert parts(job) == {"start": 35.0, "training": 8.0}
    job.play(on.StepReached(0, 0))  # another epoch
    job.now += 1.0
    assert parts(job) == {"start": 35.0, "training": 9.0}
    assert totals(job)["has_steps"]


def test_a_hang_counts_from_its_last_sign_of_life(unmodified):
    job = unmodified
    found = Totals()
    for entry in job.journal[1:]:
        turn = decode(DecidedTurn, entry)
        found.watch(turn.event, turn.actions, turn.at)
    useful = found.at(job.now)["useful_seconds"]
    found.watch(on.JobHangs(20.0, (0,), ""), [], job.now)
    found.watch(on.JobHangs(25.0, (0,), ""), [], job.now + 5.0)
    found.watch(on.JobGoesOn(), [], job.now + 6.0)
    at = found.at(job.now + 8.0)
    assert {name: seconds for name, seconds in at["parts"].items() if seconds} == {
        "start": 5.0,
        "training": 12.0,
        "hung": 26.0,
    }
    # A counter for Prometheus never goes back.
    assert at["useful_seconds"] == useful == 30.0


def test_a_hang_before_the_workers_met_is_taken_from_the_start():
    job = training()
    at = job.now
    assert parts(job, (on.JobHangs(4.0, (0,), ""), at)) == {"start": at - 104.0, "hung": 4.0}


@pytest.mark.parametrize("code", [0, 1])
def test_work_behind_the_newest_commit_is_lost_with_a_failure(code):
    job = training()
    start = job.now - 100.0
    meet(job, 0, 5)
    job.now += 20.0
    meet(job, 0, 6)
    job.now += 7.0
    found = Totals()
    for entry in job.journal[1:]:
        turn = decode(DecidedTurn, entry)
        found.watch(turn.event, turn.actions, turn.at)
    found.watch(on.Tick(), [do.Finish(JobResult(exit_code=code, elapsed=27.0))], job.now)
    expected = {"training": 20.0, "lost": 7.0} if code else {"training": 27.0}
    at = found.at(job.now)["parts"]
    assert {name: seconds for name, seconds in at.items() if seconds} == {"start": start, **expected}


def test_the_workers_of_each_host_are_counted(unmodified):
    job = unmodified
    assert totals(job)["workers"] == [{"host": host, "workers": 2, "seconds": 35.0} for host in ("a", "b")]
