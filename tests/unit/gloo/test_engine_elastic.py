"""The engine with an elastic job, by histories of events: who is in which round."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.errors import (
    ConnectFailed,
    DiscoveryFailed,
)
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.elastic_history import (
    arrive,
    discovered,
    elastic,
    places,
    pool,
    started,
    states,
    training,
    wire,
)
from tests.unit.gloo.history import AT_ONCE, GENTLE, History, lost, spec

# Workers that ask


def test_the_first_round_is_of_all_who_ask() -> None:
    job = elastic("a:2,b:1", np=3)
    assert started(arrive(job, "a", "b")) == ["a/0", "a/1", "b/0"]
    assert not job.ask("b", 0)[:-1]
    assert not places(job.ask("a", 1))
    actions = job.ask("a", 0)
    assert places(actions) == {"a/0": 0, "a/1": 1, "b/0": 2}
    (first, *_) = job.of(do.Assign, actions)
    assert (first.round, first.root, first.launch.place.size) == (0, 0, 3)
    assert first.network.master_addr == "10.0.0.1"
    assert states(job) == ["INIT", "HEALTHY", "INIT", "HEALTHY"]


def test_survivors_go_on_at_once_and_the_replaced_worker_joins_when_it_is_ready() -> None:
    job = training("a:2,b:1")
    actions = job.exit("b", 0, None, signal.SIGKILL)
    (told,) = job.of(do.Break, actions)
    assert told == do.Break(0, why.WorkerEnded(2, "b", None, signal.SIGKILL, None))
    assert started(actions) == ["b/0"]
    job.ask("a", 1, 0, 5)
    actions = job.ask("a", 0, 0, 5)
    assert places(actions) == {"a/0": 0, "a/1": 1}
    assert job.of(do.Assign, actions)[0].round == 1

    assert job.ask("b", 0) == [do.Change(1, why.MoreWorkers(1))]
    job.ask("a", 0, 1, 6)
    actions = job.ask("a", 1, 1, 6)
    assert places(actions) == {"a/0": 0, "a/1": 1, "b/0": 2}
    assert states(job)[-4:] == ["HEALTHY", "UNHEALTHY", "HEALTHY", "HEALTHY"]


def test_who_asks_before_its_peers_end_is_heard_of_breaks_the_round() -> None:
    job = training("a:1,b:1")
    assert job.of(do.Break, job.ask("a", 0, 0, 5, "")) == [do.Break(0, why.WorkerLeft(0, "a", ""))]
    actions = job.exit("b", 0, 1)
    assert places(actions) == {"a/0": 0}
    assert not job.of(do.Break, actions)
    # what broke it is known now, and is told
    cause = why.WorkerEnded(1, "b", 1, None, None)
    assert job.of(tell.RoundFormed, actions) == [tell.RoundFormed(1, 1, ("a",), cause)]


def test_who_begins_another_training_waits_for_the_others() -> None:
    job = training("a:1,b:1", max_restarts=0, reset_timeout=5.0, exit_grace=60.0)
    job.play(*[on.WorkerBeat(name, 0, 0, 5, round=0) for name in "ab"])
    assert not job.of(do.Break, job.ask("a", 0, 0, 5))
    job.now += 50.0  # rank 1 writes a checkpoint, say
    job.play(on.Tick())
    assert not job.of(do.Stop)
    assert places(job.ask("b", 0, 0, 5)) == {"a/0": 0, "b/0": 1}
    assert job.beat("a", 0, -1) == []


def test_who_leaves_a_round_by_itself_tells_why() -> None:
    job = training("a:1,b:1")
    words = "RuntimeError: Connection closed by peer " + 300 * "x"
    (broken,) = job.of(do.Break, job.ask("a", 0, 0, 5, words))
    assert broken.cause == why.WorkerLeft(0, "a", words[:200])
    formed = tell.RoundFormed(1, 2, ("a", "b"), broken.cause)
    assert job.of(tell.RoundFormed, job.ask("b", 0, 0, 5)) == [formed]


def test_rank_0_is_a_survivor_and_the_root_has_the_newest_commit() -> None:
    job = training("a:2,b:1")
    job.exit("a", 0, 1)
    job.ask("a", 0)
    job.ask("b", 0, 0, 7)
    actions = job.ask("a", 1, 0, 5)
    assert places(actions) == {"a/1": 0, "a/0": 1, "b/0": 2}
    assert {one.root for one in job.of(do.Assign, actions)} == {2}
    by_slot = {
        one.launch.slot: one.launch.place.local_rank
        for one in job.of(do.Assign, actions)
        if one.launch.host == "a"
    }
    assert by_slot == {0: 0, 1: 1}


def test_survivors_keep_their_order_when_a_replaced_worker_has_become_one() -> None:
    job = training("a:2,b:1")
    job.exit("a", 0, 1)
    job.ask("a", 0)
    job.ask("b", 0, 0, 5)
    assert places(job.ask("a", 1, 0, 5)) == {"a/1": 0, "a/0": 1, "b/0": 2}
    job.exit("b", 0, 1)
    job.ask("a", 0, 1, 6)
    assert places(job.ask("a", 1, 1, 6)) == {"a/1": 0, "a/0": 1}


def test_hosts_without_a_survivor_come_last() -> None:
    job = training("a:1,b:1,c:1")
    job.exit("a", 0, 1)
    job.ask("a", 0)
    job.ask("c", 0, 0, 5)
    assert places(job.ask("b", 0, 0, 5) + wire(job)) == {"b/0": 0, "c/0": 1, "a/0": 2}


def test_spares_wait_and_step_in() -> None:
    job = training("a:2,b:2", max_np=3, spares=1)
    assert started(job.actions) == ["a/0", "a/1", "b/0", "b/1"]
    assert job.ask("b", 1) == []
    job.exit("a", 1, 1)
    job.ask("a", 0, 0, 5)
    assert places(job.ask("b", 0, 0, 5)) == {"a/0": 0, "b/0": 1, "b/1": 2}


def test_a_question_asked_twice_is_answered_once() -> None:
    job = training("a:1,b:1")
    assert job.ask("a", 0) == []
    job.exit("b", 0, 1)
    assert places(job.ask("a", 0, 0, 5)) == {"a/0": 0}
    assert job.ask("a", 0, 0, 5) == []


def test_who_does_not_leave_a_broken_round_is_killed_and_replaced() -> None:
    job = training("a:2,b:1", reset_timeout=7.0)
    job.exit("b", 0, 1)
    job.ask("a", 0, 0, 5)
    before = job.now
    actions = job.wait()
    while not job.of(do.Stop, actions):
        actions = job.wait()
    assert job.now == pytest.approx(before + 7.0)
    assert job.of(do.Stop, actions) == [do.Stop("a", AT_ONCE, (1,))]
    assert places(actions) == {"a/0": 0}
    assert started(job.exit("a", 1, None, signal.SIGKILL)) == ["a/1"]


def test_a_worker_that_is_silent_is_killed_and_counts_as_failed() -> None:
    job = training("a:1,b:1", worker_timeout=20.0)
    began = job.now
    while not job.of(do.Stop):
        job.wait()
        job.beat("b", 0, 5)
    assert 20.0 <= job.now - began <= 24.0
    assert job.of(do.Stop) == [do.Stop("a", AT_ONCE, (0,))]
    assert job.of(tell.WorkerKilled) == [tell.WorkerKilled(why.WorkerHangs(0, "a", "silent", 20.0))]
    assert places(job.ask("b", 0, 0, 5)) == {"b/0": 0}


def test_nobody_is_taken_for_silent_when_this_process_was_stopped_itself() -> None:
    job = training("a:1,b:1", worker_timeout=20.0)
    job.now += 3600.0
    assert not job.of(do.Stop, job.play(on.Tick()))


def test_a_round_without_commits_is_broken() -> None:
    job = training("a:1,b:1", commit_timeout=30.0, worker_timeout=1000.0)
    job.now += 30.0
    assert job.of(do.Break, job.play(on.Tick())) == [do.Break(0, why.NoCommit(30.0))]


def test_a_stopped_process_is_killed() -> None:
    job = training("a:1,b:1")
    assert job.of(do.Stop, job.play(on.WorkerSuspended("b", 0, 0))) == [do.Stop("b", AT_ONCE, (0,))]


# The pool


def test_a_host_that_leaves_the_pool_is_drained_at_the_next_commit() -> None:
    job = pool("a:1,b:1")
    assert job.play(discovered("a:1")) == [do.Change(0, why.WorkersToLeave(("b",)))]
    job.ask("a", 0, 0, 6)
    actions = job.ask("b", 0, 0, 6)
    assert places(actions) == {"a/0": 0}
    (leave,) = job.of(do.Leave)
    assert (leave.host, leave.slot) == ("b", 0)
    assert do.Release("b") in job.exit("b", 0, 0)
    assert not job.of(do.Finish)


def test_a_draining_host_that_reaches_no_commit_is_stopped() -> None:
    job = pool("a:1,b:1", drain_timeout=5.0)
    job.play(discovered("a:1"))
    before = job.now
    actions = job.wait()
    while not job.of(do.Stop, actions):
        actions = job.wait()
    assert job.now == pytest.approx(before + 5.0)
    assert job.of(do.Stop, actions) == [do.Stop("b", GENTLE, (0,))]
    assert job.of(do.Break, actions)
    assert places(job.ask("a", 0, 0, 5)) == {"a/0": 0}


def test_all_hosts_that_leave_are_named() -> None:
    job = pool("n1:1,n2:1,n3:1,n4:1")
    assert job.play(discovered("n1:1")) == [do.Change(0, why.WorkersToLeave(("n2", "n3", "n4")))]


def test_a_host_that_is_back_in_time_is_not_drained() -> None:
    job = pool("a:1,b:1", drain_timeout=5.0)
    job.play(discovered("a:1"), discovered("a:1,b:1"))
    job.ask("a", 0, 0, 6)
    assert places(job.ask("b", 0, 0, 6)) == {"a/0": 0, "b/0": 1}


def test_what_the_last_workers_have_is_handed_over_before_they_leave() -> None:
    job = pool("a:1")
    assert job.of(do.Connect, job.play(discovered("b:1")))
    assert started(arrive(job, "b")) == ["b/0"]
    assert job.ask("b", 0) == [do.Change(0, why.MoreWorkers(1))]
    assert places(job.ask("a", 0, 0, 6) + wire(job)) == {"b/0": 1, "a/0": 0}
    assert job.of(do.Change)[-1] == do.Change(1, why.WorkersToLeave(("a",)))
    job.ask("a", 0, 1, 7)
    assert places(job.ask("b", 0, 1, 7)) == {"b/0": 0}
    assert [leave.host for leave in job.of(do.Leave)] == ["a"]


def test_slots_are_raised_and_lowered() -> None:
    job = pool("a:2")
    assert started(job.play(discovered("a:3"))) == ["a/2"]
    assert job.ask("a", 2) == [do.Change(0, why.MoreWorkers(1))]
    job.ask("a", 0, 0, 6)
    assert places(job.ask("a", 1, 0, 6)) == {"a/0": 0, "a/1": 1, "a/2": 2}
    assert job.of(do.Change, job.play(discovered("a:1")))
    for slot in (0, 1, 2):
        job.ask("a", slot, 1, 7)
    assert [(leave.host, leave.slot) for leave in job.of(do.Leave)] == [("a", 1), ("a", 2)]


def test_an_empty_pool_changes_nothing() -> None:
    job = pool("a:1")
    assert job.play(on.HostsDiscovered(())) == [tell.PoolEmpty(keeps_hosts=True)]


def test_a_pool_that_is_empty_at_first_is_waited_for_as_long_as_any() -> None:
    options = ElasticOptions(min_np=1, discovery_script="x", elastic_timeout=60.0)
    job = History(spec("a", elastic=options))
    job.play(on.Began(), on.HostsDiscovered(()))
    assert job.of(tell.PoolEmpty) == [tell.PoolEmpty(keeps_hosts=False)]
    assert job.of(tell.SlotsLacking) == [tell.SlotsLacking(1, 0, 60.0)]
    begun = job.now
    while not job.of(do.Finish):
        job.wait()
    assert job.now == pytest.approx(begun + 60.0)
    assert job.result.exit_code == 75


def test_a_job_that_has_too_few_slots_to_begin_says_so_once() -> None:
    options = ElasticOptions(min_np=2, discovery_script="x")
    job = History(spec("a", elastic=options))
    job.play(on.Began(), discovered("a:1"))
    assert not job.of(tell.SlotsLacking)
    arrive(job, "a")
    job.play(on.Tick())
    assert job.of(tell.SlotsLacking) == [tell.SlotsLacking(2, 1, 600.0)]


def test_discovery_that_fails_first_ends_the_job_and_later_is_told_once() -> None:
    failed = on.DiscoveryFailed(DiscoveryFailed("x: ended with status 1:\nno credentials").problem)
    job = History(spec("a", elastic=ElasticOptions(min_np=1, discovery_script="x")))
    job.play(on.Began(), failed)
    assert job.result.exit_code == 69
    assert "no credentials" in str(job.result.error)
    job = pool("a:1")
    job.play(failed, failed)
    (kept,) = job.of(tell.KeepingHosts)
    assert kept.problem.cause == "x: ended with status 1:\nno credentials"


def test_a_discovered_host_that_does_not_answer_is_tried_again_and_again() -> None:
    job = pool("a:1")
    refused = on.HostFailed("b", ConnectFailed("refused", host="b").problem)
    job.play(discovered("a:1,b:1"), refused)
    assert job.of(tell.HostNotUsable) == [tell.HostNotUsable(refused.problem, 5.0, goes_on=True)]
    before = job.now
    while len(job.of(do.Connect)) < 3:
        job.wait()
    assert job.now == pytest.approx(before + 5.0)
    job.play(refused)
    assert job.of(tell.HostNotUsable)[-1].retry_in == 10.0


# Workers that never ask


def test_workers_that_never_ask_are_stopped_and_started_anew() -> None:
    job = elastic("a:1,b:1")
    arrive(job, "a", "b")
    actions = job.exit("b", 0, 7)
    assert job.of(do.Stop, actions) == [do.Stop("a", GENTLE, (0,))]
    actions = job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    assert started(actions) == ["a/0", "b/0"]
    assert [
        (start.round, [launch.start for launch in start.launches]) for start in job.of(do.Start, actions)
    ] == [(1, [1]), (1, [1])]
    assert states(job)[-3:] == ["HEALTHY", "UNHEALTHY", "HEALTHY"]
    job.exit("a", 0)
    job.exit("b", 0)
    job.close()
    assert job.result.exit_code == 0


def test_each_round_has_the_port_that_rank_0s_host_keeps_now() -> None:
    job = elastic("a:1")
    arrive(job, "a")
    job.play(on.MasterPort("a", 31000))
    job.exit("a", 0, 7)
    assert [start.network.master_port for start in job.of(do.Start)] == [20001, 31000]


def test_a_new_host_is_used_by_a_new_round() -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=1, discovery_script="x")))
    job.play(on.Began(), discovered("a:1"))
    arrive(job, "a")
    job.play(discovered("a:1,b:1"))
    assert job.of(do.Stop, arrive(job, "b")) == [do.Stop("a", GENTLE, (0,))]
    assert not started(job.exit("a", 0, None, signal.SIGTERM, after=0.1))
    assert started(wire(job)) == ["a/0", "b/0"]


def test_a_lost_host_is_left_out() -> None:
    job = elastic("a:1,b:1,c:1")
    arrive(job, "a", "b", "c")
    actions = job.play(lost("b"))
    assert job.of(do.Stop, actions) == [do.Stop("a", GENTLE, (0,)), do.Stop("c", GENTLE, (0,))]
    assert states(job)[-1] == "UNKNOWN"
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.exit("c", 0, None, signal.SIGTERM, after=0.1)
    assert job.of(tell.HostExcluded) == [tell.HostExcluded("b", 4.0, why.HostProblem(lost("b").problem))]
    assert started(wire(job)) == ["a/0", "c/0"]
