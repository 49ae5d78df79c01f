"""Stacks of workers before a kill for a failure."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import Step
from hvlaunch.engine.workers import TIME
from tests.unit.gloo.elastic_history import elastic, training
from tests.unit.gloo.history import AT_ONCE, GENTLE, History, hosts, spec


def later(seconds: float, steps: tuple[Step, ...] = GENTLE) -> tuple[Step, ...]:
    return tuple(Step(step.signal, step.after + seconds) for step in steps)


def slow(job: History) -> History:
    """A history whose hosts send stacks only on the test's command."""
    job.has_stacks = False
    return job


def failed() -> History:
    job = slow(History(spec("a:2,b:1")).start())
    assert job.exit("a", 1, 7) == [
        do.TakeStacks("a", 1, (0,)),
        do.TakeStacks("b", 1, (0,)),
        do.Stop("a", later(TIME), (0,)),
        do.Stop("b", later(TIME), (0,)),
    ]
    return job


def test_workers_are_stopped_as_soon_as_all_stacks_are_there() -> None:
    job = failed()
    job.now += 0.1
    assert job.play(on.StacksTaken("a", 1)) == []
    assert job.play(on.StacksTaken("a", 1)) == []
    assert job.play(on.StacksTaken("b", 2)) == []
    assert job.play(on.StacksTaken("b", 1)) == [do.Stop("a", GENTLE, (0,)), do.Stop("b", GENTLE, (0,))]


def test_a_worker_that_ended_before_the_stacks_was_not_stopped() -> None:
    job = failed()
    job.exit("b", 0, 1, look="consequence")
    job.play(on.StacksTaken("a", 1))
    assert job.play(on.StacksTaken("b", 1)) == [do.Stop("a", GENTLE, (0,))]
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert [end.stopped for end in job.result.exits] == [True, False, False]


def test_stacks_that_come_when_the_time_is_over_change_nothing() -> None:
    job = failed()
    job.play(on.StacksTaken("a", 1))
    job.now += TIME
    assert job.play(on.StacksTaken("b", 1)) == []


def test_an_interrupt_waits_for_no_stacks() -> None:
    job = failed()
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE), do.Stop("b", AT_ONCE)]
    job.play(on.StacksTaken("a", 1))
    assert job.play(on.StacksTaken("b", 1)) == []
    running = slow(History(spec("a:1")).start())
    assert not running.of(do.TakeStacks, running.play(on.Interrupted(signal.SIGTERM)))


@pytest.mark.parametrize("also", ["job ends", "goes on"])
def test_a_hanging_worker_is_killed_within_half_a_second(also: str) -> None:
    job = elastic("a:2,b:1", max_restarts=0 if also == "job ends" else 9)
    slow(job.start())
    job.now += 60.0
    actions = job.play(on.WorkerSuspended("a", 0, 1))
    stops = {(stop.host, stop.slots): stop.steps for stop in job.of(do.Stop, actions)}
    assert stops == {
        ("a", (0,)): later(TIME),
        ("a", (1,)): later(TIME, AT_ONCE),
        ("b", (0,)): later(TIME),
    }
    takes = job.of(do.TakeStacks, actions)
    *first, last = [on.StacksTaken(take.host, take.number) for take in takes]
    assert not job.play(*first)
    released = job.of(do.Stop, job.play(last))
    assert {(stop.host, stop.slots): stop.steps for stop in released} == {
        ("a", (0,)): GENTLE,
        ("a", (1,)): AT_ONCE,
        ("b", (0,)): GENTLE,
    }


def test_of_asking_workers_only_the_hanging_one_has_its_stacks_taken() -> None:
    job = slow(training("a:2,b:1"))
    actions = job.play(on.WorkerSuspended("a", 0, 1))
    assert job.of(do.TakeStacks, actions) == [do.TakeStacks("a", 1, (1,))]
    assert job.of(do.Stop, actions) == [do.Stop("a", later(TIME, AT_ONCE), (1,))]
    assert job.play(on.StacksTaken("a", 1)) == [do.Stop("a", AT_ONCE, (1,))]


def test_a_second_kill_shares_the_time_limit_for_stacks() -> None:
    job = slow(training("a:2,b:1"))
    job.play(on.WorkerSuspended("a", 0, 1))
    job.now += 0.2
    actions = job.play(on.WorkerSuspended("b", 0, 0))
    assert job.of(do.TakeStacks, actions) == [do.TakeStacks("b", 2, (0,))]
    ((step,),) = [stop.steps for stop in job.of(do.Stop, actions)]
    assert step.after == pytest.approx(TIME - 0.2)


def test_no_stacks_after_the_end_of_the_last_rank() -> None:
    job = slow(History(spec("a:1,b:1", end_with_rank=0)).start())
    assert not job.of(do.TakeStacks, job.exit("a", 0))


def test_no_stacks_before_a_planned_change() -> None:
    job = slow(elastic("a:1,b:1", min_np=1, discovery_script="d"))
    job.play(on.HostsDiscovered(hosts("a:1,b:1")))
    job.start()
    assert job.of(do.Stop, job.play(on.HostsDiscovered(hosts("a:1"))))
    assert not job.of(do.TakeStacks)
