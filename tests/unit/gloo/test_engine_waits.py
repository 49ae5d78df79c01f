"""The engine with an elastic job, by histories of events: each wait has an end, and no host is lost for a blip."""

import itertools
import signal
from pathlib import Path

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.errors import ConnectFailed, HostLost
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.elastic_history import (
    arrive,
    discovered,
    elastic,
    everyone,
    excluded,
    places,
    pool,
    started,
    training,
    wire,
)
from tests.unit.gloo.history import AT_ONCE, History, lost, ready, spec

# Workers that never meet


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


def test_a_round_whose_workers_never_meet_is_broken_and_who_stays_in_it_is_killed() -> None:
    job = training("a:1,b:1,c:1", reset_timeout=30.0, worker_timeout=8.0)
    met(job, 0, "a", "b")
    actions = pass_time(job, 60.0)
    cause = why.NotMet((2,), ("c",), 30.0)
    assert job.of(do.Break, actions) == [do.Break(0, cause)]
    late = [why.WorkerHangs(rank, host, "late", None) for rank, host in enumerate("abc")]
    assert job.of(tell.WorkerKilled, actions) == [tell.WorkerKilled(hangs) for hangs in late]
    assert job.of(do.Stop, actions) == [do.Stop(host, AT_ONCE, (0,)) for host in "abc"]


def test_a_round_whose_workers_have_met_goes_on() -> None:
    job = training("a:1,b:1", reset_timeout=30.0, worker_timeout=8.0)
    met(job, 0, "a", "b")
    assert not job.of(do.Break, pass_time(job, 600.0))


def test_a_driver_that_was_stopped_gives_the_workers_words_time() -> None:
    job = training("a:1,b:1", reset_timeout=30.0, worker_timeout=600.0)
    job.now += 100.0
    assert not job.of(do.Break, job.play(on.Tick()))
    met(job, 0, "a", "b")
    assert not job.of(do.Break, pass_time(job, 100.0))


# Hosts that are all lost at once


def test_hosts_that_the_job_cannot_do_without_are_tried_again() -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=2, discovery_script="x")))
    job.play(on.Began(), discovered("a:1,b:1,c:1"))
    arrive(job, *"abc")
    job.play(lost("a"))
    assert excluded(job) == [("a", None, "HostProblem")]
    job.play(lost("b"))
    assert excluded(job)[1:] == [("b", 5.0, "HostProblem"), ("a", 5.0, "HostProblem")]
    actions = job.play(lost("c"))
    assert not job.of(do.Connect, actions)
    while not (connects := [one.host.name for one in job.of(do.Connect, job.wait())]):
        pass
    assert connects == ["a", "b", "c"]
    assert started(arrive(job, *"abc"))


def test_so_they_are_in_a_fixed_pool_until_time_is_up() -> None:
    job = training("a:1,b:1", cooldown=None, min_np=2, elastic_timeout=60.0, worker_timeout=1e6)
    job.play(lost("b"))
    job.ask("a", 0, 0, 5)
    while job.of(do.Finish) == [] and job.engine.deadline is not None:
        for connect in job.of(do.Connect, job.wait()):
            assert connect.host.name == "b"
            job.play(on.HostFailed("b", ConnectFailed("no route", host="b").problem))
        if job.of(do.Stop):
            job.exit("a", 0, None, signal.SIGTERM, after=0.1)
            break
    assert len([one for one in job.of(do.Connect) if one.host.name == "b"]) >= 3
    job.close()
    assert job.problem.kind == "NotEnoughSlotsInTime"


def test_a_lost_host_is_tried_again_when_others_leave_later() -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=2, discovery_script="x")))
    job.play(on.Began(), discovered("a:1,b:1,c:1"))
    arrive(job, *"abc")
    job.play(lost("a"))
    assert excluded(job) == [("a", None, "HostProblem")]
    job.play(discovered("a:1,b:1"))
    assert excluded(job)[1:] == [("a", 5.0, "HostProblem")]


def where_one_has_the_state() -> History:
    """Host b was lost and is back with new workers; those of a have asked, of whom one was in round 0."""
    job = training("a:2,b:2", reset_timeout=6.0, worker_timeout=1e6)
    job.exit("a", 0, 1)
    job.ask("a", 0)
    job.play(lost("b"))
    job.ask("a", 1, 0, 5)
    job.now += 4.0
    job.play(on.Tick())
    arrive(job, "b")
    job.ask("b", 0)
    job.ask("b", 1)
    job.ask("a", 1, 1, 5)
    return job


def test_a_host_is_kept_that_alone_has_the_state() -> None:
    job = where_one_has_the_state()
    job.now += 6.0
    actions = job.play(on.Tick())
    assert job.of(tell.WorkerKilled, actions)
    assert [host for host, *_ in excluded(job)] == ["b"]
    assert "a/1" in places(actions + wire(job))


def test_a_host_is_kept_that_alone_has_the_state_also_where_others_were_in_a_round() -> None:
    job = where_one_has_the_state()
    wire(job)
    job.ask("b", 0, 1, -1, "a peer is gone")
    job.ask("b", 1, 1, -1)
    job.now += 6.0
    actions = job.play(on.Tick())
    assert job.of(tell.WorkerKilled, actions)
    assert [host for host, *_ in excluded(job)] == ["b"]


def test_two_late_workers_of_a_host_that_is_excluded_for_the_first() -> None:
    job = training("a:2,b:2", reset_timeout=6.0, worker_timeout=1e6)
    job.exit("a", 0, 1)
    job.ask("a", 0)
    everybody = [("a", 1), ("b", 0), ("b", 1)]
    for host, slot in everybody:
        job.ask(host, slot, 0, 5)
    for host, slot in [("a", 0), *everybody]:
        job.ask(host, slot, 1, 5)
    job.ask("b", 0, 2, 5, "a peer is gone")
    job.ask("b", 1, 2, 5)
    job.now += 6.0
    actions = job.play(on.Tick())
    assert job.of(tell.WorkerKilled, actions)
    assert [host for host, *_ in excluded(job)] == ["a"]


def test_who_is_killed_in_the_same_turn_has_no_state_to_hand_over() -> None:
    job = training("a:2,b:1", reset_timeout=6.0, worker_timeout=1e6)
    job.exit("a", 0, 1)
    job.ask("a", 0)
    job.ask("a", 1, 0, 5)
    assert places(job.ask("b", 0, 0, 5)).keys() == {"a/0", "a/1", "b/0"}
    job.ask("a", 0, 1, 5, "a peer is gone")
    job.now += 6.0
    actions = job.play(on.Tick())
    assert killed(job, actions) == ["a", "b"]
    assert not excluded(job)


# Agents that end, and do not


def parting(host: str) -> on.HostParting:
    return on.HostParting(host, HostLost("lost: got SIGTERM", host=host).problem)


def test_an_agent_that_says_it_ends_and_does_not_is_given_up_and_the_host_used_again() -> None:
    job = training("a:1,b:1", worker_timeout=1e6)
    job.play(parting("b"))
    began = job.now
    job.exit("b", 0, None, signal.SIGTERM)
    job.ask("a", 0, 0, 5)
    while not (actions := job.of(do.Abandon, pass_time(job, 1.0))):
        assert job.now <= began + 10.0 + 25.0 + 1.0
    assert actions == [do.Abandon("b")]
    assert tell.HostNotClosing("b") in job.actions
    assert job.of(do.Connect)[-1].host.name == "b"


def test_so_it_is_when_the_driver_was_stopped_meanwhile_and_its_workers_live() -> None:
    job = training("a:1,b:1", worker_timeout=1e6, reset_timeout=1e6)
    job.play(parting("b"))
    job.now += 100.0
    actions = job.play(on.Tick())
    assert job.of(do.Abandon, actions) == [do.Abandon("b")]
    assert [host for host, *_ in excluded(job)] == ["b"]
    assert places(job.ask("a", 0, 0, 5)) == {"a/0": 0}


def test_who_outlives_sigkill_gets_no_more_time_because_its_agent_ends() -> None:
    job = training("a:1,b:2", worker_timeout=1e6)
    job.play(on.WorkerSuspended("b", 0, 0))
    job.now += 9.0
    job.play(parting("b"))
    assert do.Abandon("b") in pass_time(job, 7.0)


def test_a_host_that_does_not_answer_is_not_given_up_for_an_end_that_it_can_not_tell() -> None:
    job = training("a:1,b:2", worker_timeout=1e6)
    job.play(on.WorkerSuspended("b", 0, 0), on.HostQuiet("b"))
    assert do.Abandon("b") not in pass_time(job, 29.0)  # another connection may be there by then
    job.play(on.HostAnswers("b"))
    assert do.Abandon("b") in pass_time(job, 7.0)


def test_one_that_answers_now_and_then_is_not_waited_for_for_ever() -> None:
    job = training("a:1,b:2", worker_timeout=1e6)
    job.play(on.WorkerSuspended("b", 0, 0), on.HostQuiet("b"))
    told = [
        action
        for _ in range(8)
        for action in [*pass_time(job, 6.0), *job.play(on.HostAnswers("b"), on.HostQuiet("b"))]
    ]
    assert do.Abandon("b") in told


def test_hosts_that_did_not_close_are_tried_anew_when_they_are_back() -> None:
    job = pool("a:1,b:1", drain_timeout=1.0)
    job.play(discovered("a:1"))
    job.ask("a", 0, 0, 6)
    job.ask("b", 0, 0, 6)
    assert do.Release("b") in job.exit("b", 0, 0)
    assert do.Abandon("b") in pass_time(job, 30.0)
    probes = len(job.of(do.Probe))
    job.play(discovered("a:1,b:1"), *ready("b", 2))
    job.ask("b", 0)
    job.ask("a", 0, 1, 7)
    assert {one.target for one in job.of(do.Probe)[probes:]} == {"a", "b"}


# The first list of hosts


def test_a_job_whose_hosts_nobody_names_ends() -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=1, hostfile=Path("hosts"), discovery_timeout=30.0)))
    job.play(on.Began())
    began = job.now
    job.wait()
    assert job.problem.kind == "DiscoveryFailed"
    assert 30.0 <= job.now - began <= 40.0


# Workers that hang while they wait, and take long to end


def test_a_worker_that_hangs_while_the_next_round_is_planned_is_not_in_it() -> None:
    job = training("a:1,b:1,c:1", min_np=2)
    job.play(lost("c"))
    job.ask("a", 0, 0, 5)
    job.ask("b", 0, 0, 5)
    job.now += 4.0
    job.play(on.Tick(), *ready("c", 3))
    job.ask("c", 0)
    job.ask("a", 0, 1, 6)
    job.ask("b", 0, 1, 6)
    job.play(on.WorkerSuspended("b", 0, 0))
    assert places(wire(job)) == {"a/0": 0, "c/0": 1}


def test_who_is_killed_and_has_not_ended_has_no_state_to_hand_over() -> None:
    job = pool("a:1,b:1", worker_timeout=1e6)
    job.play(discovered("b:1"))
    job.play(on.WorkerSuspended("b", 0, 0))
    assert not job.of(do.Leave, job.ask("a", 0, 0, 6))


# Rounds that all have left


def test_a_round_that_all_have_left_is_not_broken_for_lack_of_commits() -> None:
    job = pool("a:1,b:1", min_np=2, commit_timeout=15.0, worker_timeout=1e6)
    job.play(discovered("a:1"))
    job.ask("a", 0, 0, 6)
    job.ask("b", 0, 0, 6)
    assert not job.of(do.Break, pass_time(job, 100.0))


def test_a_round_whose_workers_are_all_done_is_not_broken_for_lack_of_commits() -> None:
    """The news of their ends may be on its way for long."""
    job = pool("a:1,b:1", min_np=2, commit_timeout=15.0, worker_timeout=1e6)
    for host in "ab":
        job.play(on.WorkerBeat(host, 0, 0, 6, is_last=True, round=0, is_done=True))
    job.now += 100.0
    assert not job.of(do.Break, job.play(on.Tick()))


# A pool that flaps


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


def test_a_pool_that_flaps_does_not_restart_all_for_ever() -> None:
    times = rounds_of_a_flapping_pool(120)
    spans = [after - before for before, after in itertools.pairwise(times)]
    assert len(spans) < 8, spans
    assert max(spans) > 30.0, spans


# Who ends well in the middle


def test_an_early_end_is_told() -> None:
    job = training("a:1,b:1")
    assert job.of(tell.WorkerEndedEarly, job.exit("b", 0, 0)) == [tell.WorkerEndedEarly(1, "b")]


def test_the_end_of_a_training_is_no_early_one() -> None:
    job = training("a:1,b:1")
    job.play(on.WorkerBeat("b", 0, 0, 6, is_last=True, is_done=True))
    assert not job.of(tell.WorkerEndedEarly, job.exit("b", 0, 0))


def test_the_first_who_asks_is_a_reason_to_start_others_in_slots_that_are_free() -> None:
    job = elastic("a:2,b:1,c:1", min_np=2)
    arrive(job, "a")
    while not job.of(do.Start):
        job.wait()
    arrive(job, "b")
    assert "b" in [start.host for start in job.of(do.Start, job.ask("a", 0))]


# Hosts that do not answer


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


def test_nobody_is_killed_for_what_the_link_of_the_driver_does() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    job.play(on.HostQuiet("a"), on.HostQuiet("b"))
    actions = beat_on(job, 27.0)
    job.play(on.HostAnswers("a"), on.HostAnswers("b"))
    actions += beat_on(job, 7.9)
    assert killed(job, actions) == []
    assert killed(job, beat_on(job, 60.0, "a", "b")) == []


def test_who_hangs_on_a_host_that_answers_again_is_killed_when_its_time_has_begun_anew() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    job.play(on.HostQuiet("a"))
    assert killed(job, beat_on(job, 20.0, "b")) == []
    job.play(on.HostAnswers("a"))
    assert killed(job, beat_on(job, 7.9, "b")) == []
    assert killed(job, beat_on(job, 1.2, "b")) == ["a"]


def test_a_link_that_flaps_excuses_nobody_for_ever() -> None:
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


def test_where_all_fall_silent_at_once_they_have_twice_the_time() -> None:
    job = training("a:1,b:1", worker_timeout=8.0)
    assert killed(job, beat_on(job, 15.9)) == []
    assert killed(job, beat_on(job, 1.2)) == ["a", "b"]


def test_the_only_worker_is_killed_as_soon_as_ever() -> None:
    job = training("a:1", worker_timeout=8.0)
    assert killed(job, beat_on(job, 9.2)) == ["a"]


def test_who_could_not_hear_that_the_round_is_broken_has_its_time_when_its_host_answers() -> None:
    job = training("a:1,b:1,c:1", reset_timeout=10.0, worker_timeout=1e6)
    job.play(on.HostQuiet("a"))
    job.exit("c", 0, 1)
    job.ask("b", 0, 0, 5, "it is gone")
    assert killed(job, pass_time(job, 25.0)) == []
    job.play(on.HostAnswers("a"))
    assert killed(job, pass_time(job, 9.9)) == []
    assert killed(job, pass_time(job, 0.2)) == ["a"]
