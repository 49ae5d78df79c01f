"""The engine with an elastic job, by histories of events: restarts, cool-downs, and how the job ends."""

import signal
from collections.abc import Callable

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Step
from hvlaunch.errors import (
    ConnectFailed,
)
from tests.unit.gloo.elastic_history import (
    arrive,
    discovered,
    elastic,
    excluded,
    places,
    pool,
    started,
    states,
    training,
)
from tests.unit.gloo.history import GENTLE, History, lost

# Ends


def test_the_first_who_ends_well_ends_the_training() -> None:
    job = training("a:1,b:1", max_np=2, exit_grace=30.0)
    actions = job.exit("a", 0)
    steps = (Step(signal.SIGTERM, 30.0), Step(signal.SIGKILL, 40.0))
    assert job.of(do.Stop, actions) == [do.Stop("b", steps, (0,))]
    job.exit("b", 0)
    job.close()
    assert job.result.exit_code == 0
    assert states(job)[-1] == "SUCCEEDED"


def test_a_failure_after_the_first_who_ended_well_is_the_jobs() -> None:
    job = training("a:1,b:1")
    job.exit("a", 0)
    assert not job.of(do.Break, job.exit("b", 0, 3))
    job.close()
    assert job.result.exit_code == 3


def test_who_waits_when_training_is_done_is_told_to_leave() -> None:
    job = training("a:2", max_np=1, spares=1)
    job.ask("a", 1)
    actions = job.exit("a", 0)
    assert [leave.slot for leave in job.of(do.Leave, actions)] == [1]
    job.exit("a", 1)
    job.close()
    assert job.result.exit_code == 0


def test_all_restarts_are_used_up() -> None:
    job = training("a:1,b:1", max_restarts=1)
    job.exit("b", 0, 7)
    job.ask("a", 0, 0, 6)
    job.ask("b", 0)
    job.ask("a", 0, 1, 7)
    actions = job.exit("b", 0, 9)
    assert do.Stop("a", GENTLE, (0,)) in actions
    assert tell.JobEnding(why.RestartsUsedUp(1)) in actions
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.exit_code == 9
    assert states(job)[-1] == "FAILED"


def test_a_job_that_gives_up_does_not_end_well_though_nobody_is_known_to_have_failed() -> None:
    job = training("a:1,b:1", max_restarts=0)
    job.ask("a", 0, 0, 5, "Connection closed by peer")
    for name in "ab":
        job.exit(name, 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.problem.kind == "GaveUp"
    assert job.result.exit_code == 1


def test_who_was_killed_before_our_time_is_the_failure_though_others_had_left_already() -> None:
    job = training("a:1,b:1", max_restarts=0)
    job.ask("b", 0, 0, 5)
    job.exit("a", 0, None, signal.SIGKILL, after=0.01)
    job.exit("b", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.failure is not None
    assert (job.result.failure.host, job.result.exit_code) == ("a", 137)


def test_a_hung_worker_that_is_lost_with_its_host_is_the_failure() -> None:
    job = training("a:1,b:1", max_restarts=0)
    job.play(on.WorkerSuspended("b", 0, 0), lost("b"))
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.failure is not None
    assert (job.result.failure.rank, job.result.exit_code) == (1, 137)


def test_restarts_are_given_back_with_time() -> None:
    job = training("a:1,b:1", max_restarts=1, restart_window=100.0)
    job.exit("b", 0, 7)
    job.ask("a", 0, 0, 6)
    job.now += 101.0
    assert job.of(do.Break, job.exit("a", 0, 7))


def test_changes_of_size_use_up_no_restarts() -> None:
    job = pool("a:1", max_restarts=0)
    assert started(job.play(discovered("a:2")))
    assert job.of(do.Change, job.ask("a", 1))
    assert places(job.ask("a", 0, 0, 6))
    assert job.of(do.Change, job.play(discovered("a:1")))
    assert not job.of(do.Finish)


def test_a_job_that_gets_nowhere_ends_with_what_killed_it() -> None:
    job = elastic("a:1")
    arrive(job, "a")
    for _ in range(4):
        assert started(job.exit("a", 0, 13)) == ["a/0"]
    job.exit("a", 0, 13)
    job.close()
    assert job.result.exit_code == 13
    assert job.of(tell.JobEnding) == [tell.JobEnding(why.NoProgress(5))]


def test_a_job_whose_larger_rounds_fail_at_once_and_whose_smaller_ones_get_somewhere_goes_on() -> None:
    job = training("a:2", cooldown=(500.0, 500.0), min_np=1)
    number, commit = 0, 5
    for _ in range(7):
        job.exit("a", 1, None, signal.SIGKILL)
        assert places(job.ask("a", 0, number, commit)) == {"a/0": 0}
        commit += 1
        job.beat("a", 0, commit)
        assert job.of(do.Change, job.ask("a", 1))
        assert places(job.ask("a", 0, number + 1, commit)) == {"a/0": 0, "a/1": 1}
        number += 2
    assert not job.of(do.Finish)
    for _ in range(6):  # after the first of these, nobody gets anywhere any more
        job.exit("a", 1, None, signal.SIGKILL)
        job.ask("a", 0, number, commit)
        job.ask("a", 1)
        job.ask("a", 0, number + 1, commit)
        number += 2
    assert job.of(tell.JobEnding) == [tell.JobEnding(why.NoProgress(5))]


def test_commits_that_are_told_after_the_failure_are_progress_too() -> None:
    """A worker's beat may come late, or never; it says what it has when it asks."""
    job = training("a:2", min_np=2)
    for number in range(8):
        _fail(job, number, commit=6 + number)
    assert not job.of(tell.JobEnding)


def _lose(job: History) -> None:
    job.play(lost("b"))


def _drain(job: History) -> None:
    job.play(discovered("a:2"))
    job.now += 31.0
    job.play(on.Tick())


@pytest.mark.parametrize("end", [_lose, _drain])
def test_a_round_that_got_somewhere_counts_however_it_ended(end: Callable[[History], None]) -> None:
    job = pool("a:2,b:1", min_np=2)
    for number in range(5):
        _fail(job, number, commit=5)
        job.ask("b", 0, number, 5)
    job.beat("a", 0, 6)
    end(job)
    for number in range(5, 9):
        _fail(job, number, commit=6)
    assert not job.of(tell.JobEnding)


def _fail(job: History, number: int, *, commit: int) -> None:
    """The round's second worker is killed and started anew, and the first has that commit."""
    job.exit("a", 1, None, signal.SIGKILL)
    job.ask("a", 0, number, commit)
    job.ask("a", 1)


def test_a_host_that_always_fails_is_excluded_twice_as_long_each_time() -> None:
    job = training("a:1,b:1")
    for seconds in (4, 8):
        for _ in range(2):
            while started(job.exit("b", 0, 1)) != ["b/0"] and ("b", seconds, "WorkersFail") not in excluded(
                job
            ):
                job.wait()
        assert excluded(job)[-1] == ("b", seconds, "WorkersFail")
        job.ask("a", 0, 0 if seconds == 4 else 1, 6)
        job.play(on.HostClosed("b"))
        while len(job.of(do.Connect)) < {4: 3, 8: 4}[seconds]:
            job.wait()
            job.beat("a", 0, 6)
        arrive(job, "b")
    assert not job.of(do.Finish)


def test_a_cause_that_is_heard_of_late_does_not_make_its_round_one_that_got_somewhere() -> None:
    job = elastic("a:1,b:1")
    arrive(job, "a", "b")
    for number in range(2):
        at = job.now
        job.exit("a", 0, 1, look="consequence")
        job.wait()
        assert job.of(tell.RoundEnding)[-1].round == number
        job.now += 20.0
        job.exit("b", 0, 1, look="cause", after=at - job.now)
    assert excluded(job) == [("b", 4.0, "WorkersFail")]


def test_a_host_where_workers_never_get_as_far_as_to_ask_is_excluded_as_long() -> None:
    job = elastic("a:1,b:1", cooldown=(0.5, 60.0))
    arrive(job, "a", "b")
    job.ask("a", 0)
    job.exit("b", 0, 1)
    while "b/0" not in started(job.wait()):
        pass
    for seconds in (0.5, 1, 2):
        job.exit("b", 0, 1)
        assert excluded(job)[-1] == ("b", seconds, "WorkersFail")
        connected = len(job.of(do.Connect))
        job.play(on.HostClosed("b"))
        while len(job.of(do.Connect)) == connected:
            job.wait()
        assert started(arrive(job, "b")) == ["b/0"]  # no wait of its slot's own comes on top


def test_too_few_slots_for_too_long() -> None:
    job = training("a:1,b:1", min_np=2, elastic_timeout=50.0)
    job.play(lost("b"))
    job.ask("a", 0, 0, 5)
    before = job.now
    while not job.of(do.Release):
        assert job.now <= before + 50.0
        job.play(
            *[
                on.HostFailed("b", ConnectFailed("no", host="b").problem)
                for _ in job.of(do.Connect, job.wait())
            ]
        )
        job.beat("a", 0, 5)
        if job.of(do.Stop):
            job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.now == pytest.approx(before + 50.0)
    assert job.problem.kind == "NotEnoughSlotsInTime"
    assert job.result.exit_code == 75


def test_hosts_that_are_slow_to_start_are_waited_for_all_the_same() -> None:
    job = elastic("a:1,b:1", min_np=2, elastic_timeout=1.0)
    arrive(job, "a")
    job.now += 5.0
    job.play(on.Tick())
    assert started(arrive(job, "b")) == ["a/0", "b/0"]


def test_without_a_range_a_lost_host_is_excluded_for_good() -> None:
    job = training("a:1,b:1", cooldown=None, min_np=1)
    job.play(lost("b"))
    assert excluded(job) == [("b", None, "HostProblem")]


def test_a_fixed_pool_that_can_never_be_enough_fails_as_a_static_job_does() -> None:
    job = elastic("a:1,b:1,c:1", min_np=2, cooldown=None)
    for name in "bc":
        job.play(on.HostFailed(name, ConnectFailed("refused", host=name).problem))
    arrive(job, "a")
    job.close()
    assert job.problem.kind == "HostsFailed"
    assert not job.of(do.Start)


def test_an_interrupt_ends_all_who_wait_too() -> None:
    job = training("a:2", max_np=1, spares=1)
    job.ask("a", 1)
    assert job.of(do.Stop, job.play(on.Interrupted(signal.SIGTERM))) == [do.Stop("a", GENTLE)]
    for slot in (0, 1):
        job.exit("a", slot, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.exit_code == 143
    assert states(job)[-1] == "STOPPED"


def test_the_ends_of_those_who_wait_for_the_next_round_are_known() -> None:
    job = training("a:1,b:1", min_np=2)
    job.play(lost("b"))
    job.ask("a", 0, 0, 5)
    job.play(on.Interrupted(signal.SIGTERM))
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert [(end.rank, end.signal, end.stopped) for end in job.result.exits] == [(0, signal.SIGTERM, True)]
