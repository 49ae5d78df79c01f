"""The engine when another driver has taken the job over, or its own was stopped: nothing ends for what could not be heard or done meanwhile."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.unit.gloo.elastic_history import elastic, excluded, training
from tests.unit.gloo.history import History, ready, spec
from tests.unit.gloo.test_engine_waits import beat_on, killed, pass_time

ABSENCE = 100.0


def replaced(job: History) -> list[do.Action]:
    """Nobody was there; then another driver is, and what was due long ago has not come yet."""
    job.now += ABSENCE
    return [*job.play(on.DriverReplaced(ABSENCE)), *job.play(on.Tick())]


def test_hosts_whose_workers_may_have_ended_are_not_given_up() -> None:
    job = History(spec("a:1,b:1")).start()
    job.play(on.Interrupted(signal.SIGTERM))
    assert job.of(tell.HostLostAtEnd, replaced(job)) == []


def test_hosts_that_are_connected_anew_have_their_time() -> None:
    job = History(spec("a:1,b:1", start_timeout=60.0))
    job.play(on.Began())
    assert job.of(do.Abandon, replaced(job)) == []
    job.now += 59.0
    assert job.of(do.Abandon, job.play(on.Tick())) == []
    job.now += 2.0
    assert job.of(do.Abandon, job.play(on.Tick())) == [do.Abandon("a"), do.Abandon("b")]


def test_ways_that_could_not_be_told_of_have_their_time() -> None:
    job = elastic("a:1,b:1", min_np=2)
    job.play(*ready("a", 1), *ready("b", 2), on.HostProbed("b", "a", "10.0.0.1"))
    job.now += ABSENCE
    job.play(on.DriverStopped(ABSENCE - 8.0), on.Tick())
    assert not excluded(job)
    assert job.of(do.Start, job.play(on.HostProbed("a", "b", "10.0.0.2")))


@pytest.mark.parametrize("seconds", [10.0, 25.0])
def test_who_could_not_say_that_it_has_left_a_round_is_not_killed(seconds: float) -> None:
    job = training("a:1,b:1,c:1", reset_timeout=30.0, worker_timeout=1e6)
    job.exit("c", 0, 1)
    job.now += seconds
    assert killed(job, replaced(job)) == []
    assert killed(job, pass_time(job, 30.0 - seconds)) == []


def test_a_host_that_did_not_answer_is_asked_anew() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    job.play(on.HostQuiet("a"))
    replaced(job)
    assert killed(job, beat_on(job, 20.0, "b")) == ["a"]


def late_in_every_turn(job: History, turns: int) -> list[do.Action]:
    """The driver has a processor every 12 s, and looks 5 s after it has had one."""
    new: list[do.Action] = []
    for _ in range(turns):
        job.now += 12.0
        new += job.play(on.DriverStopped(7.0), on.Tick())
    return new


def test_who_stays_in_a_broken_round_is_killed_though_the_driver_is_always_late() -> None:
    job = training("a:1,b:1,c:1", reset_timeout=30.0, worker_timeout=1e6)
    job.exit("c", 0, 1)
    assert killed(job, late_in_every_turn(job, 60)) == ["a", "b"]


def test_so_is_who_is_silent() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    assert killed(job, late_in_every_turn(job, 60)) == ["a", "b"]


def test_so_is_a_round_broken_whose_workers_do_not_meet() -> None:
    job = training("a:1,b:1", reset_timeout=30.0, worker_timeout=1e6)
    assert job.of(do.Break, late_in_every_turn(job, 60))


def test_so_is_a_host_given_up_that_does_not_get_ready() -> None:
    job = History(spec("a:1,b:1", start_timeout=60.0))
    job.play(on.Began())
    assert job.of(do.Abandon, late_in_every_turn(job, 60)) == [do.Abandon("a"), do.Abandon("b")]
