"""Histories of the engine that stories do not suit: long loops, and errors before a job begins."""

import itertools
import signal
from pathlib import Path

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.errors import NotEnoughSlots
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.elastic_history import (
    arrive,
    discovered,
    everyone,
    training,
    wire,
)
from tests.unit.gloo.history import AT_ONCE, History, spec

ABSENCE = 100.0


def test_too_many_processes_is_known_before_anything_is_contacted() -> None:
    with pytest.raises(NotEnoughSlots) as caught:
        History(spec("a:2,b:2", np=5))
    assert (caught.value.needed, caught.value.available) == (5, 4)


def test_worker_that_leaves_a_round_by_itself_gives_the_reason() -> None:
    job = training("a:1,b:1")
    words = "RuntimeError: Connection closed by peer " + 300 * "x"
    (broken,) = job.of(do.Break, job.ask("a", 0, 0, 5, words))
    assert broken.cause == why.WorkerLeft(0, "a", words[:200])
    formed = tell.RoundFormed(1, 2, ("a", "b"), broken.cause)
    assert job.of(tell.RoundFormed, job.ask("b", 0, 0, 5)) == [formed]


def met(job: History, number: int, *hosts: str) -> None:
    for host in hosts:
        job.play(on.WorkerBeat(host, 0, job.born(host, 0)[1], 0, round=number))


def pass_time(job: History, seconds: float) -> list[do.Action]:
    until = job.now + seconds
    new: list[do.Action] = []
    while job.engine.deadline is not None and job.engine.deadline <= until:
        for host, slot in everyone(job):
            job.beat(host, slot, 5)
        new += job.wait()
    job.now = until
    return new


def test_round_whose_workers_never_meet_is_broken_and_stuck_workers_are_killed() -> None:
    job = training("a:1,b:1,c:1", reset_timeout=30.0, worker_timeout=8.0)
    met(job, 0, "a", "b")
    actions = pass_time(job, 60.0)
    cause = why.NotMet((2,), ("c",), 30.0)
    assert job.of(do.Break, actions) == [do.Break(0, cause)]
    late = [why.WorkerHangs(rank, host, "late", None) for rank, host in enumerate("abc")]
    assert job.of(tell.WorkerKilled, actions) == [tell.WorkerKilled(hangs) for hangs in late]
    assert job.of(do.Stop, actions) == [do.Stop(host, AT_ONCE, (0,)) for host in "abc"]


def test_round_whose_workers_have_met_continues() -> None:
    job = training("a:1,b:1", reset_timeout=30.0, worker_timeout=8.0)
    met(job, 0, "a", "b")
    assert not job.of(do.Break, pass_time(job, 600.0))


def test_job_without_a_first_list_of_hosts_ends() -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=1, hostfile=Path("hosts"), discovery_timeout=30.0)))
    job.play(on.Began())
    began = job.now
    job.wait()
    assert job.problem.kind == "DiscoveryFailed"
    assert 30.0 <= job.now - began <= 40.0


def rounds_of_a_flapping_pool(seconds: int) -> list[float]:
    """When the workers of unmodified scripts are started, where host b comes and goes each second."""
    job = History(spec("a", elastic=ElasticOptions(min_np=1, discovery_script="x", drain_timeout=30.0)))
    job.play(on.Began(), discovered("a:1,b:1"))
    arrive(job, *"ab")
    times = [job.now]
    for second in range(seconds):
        job.now += 1.0
        actions: list[do.Action] = job.play(discovered("a:1" if second % 2 == 0 else "a:1,b:1"))
        for _ in range(5):
            new: list[do.Action] = []
            for action in actions:
                if isinstance(action, do.Connect):
                    new += arrive(job, action.host.name)
                elif isinstance(action, do.Stop):
                    new += job.exit(action.host, 0, None, signal.SIGTERM, after=0.1)
                elif isinstance(action, do.Release):
                    new += job.play(on.HostClosed(action.host))
                elif isinstance(action, tell.RoundStarting):
                    times.append(job.now)
            actions = new + wire(job)
    return times


def test_flapping_pool_does_not_restart_all_workers_for_ever() -> None:
    times = rounds_of_a_flapping_pool(120)
    spans = [after - before for before, after in itertools.pairwise(times)]
    assert len(spans) < 8, spans
    assert max(spans) > 30.0, spans


def beat_on(job: History, seconds: float, *hosts: str) -> list[do.Action]:
    """Time passes, and the workers of these hosts alone are heard."""
    until = job.now + seconds
    new: list[do.Action] = []
    while job.engine.deadline is not None and job.engine.deadline <= until:
        for host in hosts:
            job.beat(host, 0, 5)
        new += job.wait()
    job.now = until
    return new


def killed(job: History, actions: list[do.Action]) -> list[str]:
    return [fact.cause.host for fact in job.of(tell.WorkerKilled, actions)]


def test_no_worker_is_killed_for_a_cut_of_the_drivers_link() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    job.play(on.HostQuiet("a"), on.HostQuiet("b"))
    actions = beat_on(job, 27.0)
    job.play(on.HostAnswers("a"), on.HostAnswers("b"))
    actions += beat_on(job, 7.9)
    assert killed(job, actions) == []
    assert killed(job, beat_on(job, 60.0, "a", "b")) == []


@pytest.mark.parametrize("old", [on.WorkerAsked("a", 0, 0, -1, -1), on.WorkerBeat("a", 0, 0, 6)])
def test_old_message_after_the_last_beat_does_not_make_a_worker_silent(old: on.Event) -> None:
    job = training("a:1", worker_timeout=8.0)
    job.play(on.WorkerBeat("a", 0, 0, 6, is_last=True, is_done=True), old)
    assert killed(job, beat_on(job, 60.0)) == []


def test_flapping_link_excuses_no_worker_for_ever() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    began = job.now
    actions: list[do.Action] = []
    while not killed(job, actions):
        job.play(on.HostQuiet("a"))
        actions += beat_on(job, 2.0, "b")
        job.play(on.HostAnswers("a"))
        actions += beat_on(job, 2.0, "b")
    assert killed(job, actions) == ["a"]
    assert 30.0 + 16.0 <= job.now - began < 30.0 + 16.0 + 6.0


def late_in_every_turn(job: History, turns: int) -> list[do.Action]:
    """The driver has a processor every 12 s, and looks 5 s after it has had one."""
    new: list[do.Action] = []
    for _ in range(turns):
        job.now += 12.0
        new += job.play(on.DriverStopped(7.0), on.Tick())
    return new


def test_worker_that_stays_in_a_broken_round_is_killed_by_a_late_driver() -> None:
    job = training("a:1,b:1,c:1", reset_timeout=30.0, worker_timeout=1e6)
    job.exit("c", 0, 1)
    assert killed(job, late_in_every_turn(job, 60)) == ["a", "b"]


def test_silent_worker_is_killed_by_a_late_driver() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    assert killed(job, late_in_every_turn(job, 60)) == ["a", "b"]


def test_round_whose_workers_do_not_meet_is_broken_by_a_late_driver() -> None:
    job = training("a:1,b:1", reset_timeout=30.0, worker_timeout=1e6)
    assert job.of(do.Break, late_in_every_turn(job, 60))


def test_host_that_never_gets_ready_is_given_up_by_a_late_driver() -> None:
    job = History(spec("a:1,b:1", start_timeout=60.0))
    job.play(on.Began())
    assert job.of(do.Abandon, late_in_every_turn(job, 60)) == [do.Abandon("a"), do.Abandon("b")]
