"""The engine with an elastic job, by histories of events: hosts that can't reach each other, or can't for a moment."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.elastic_history import (
    arrive,
    discovered,
    elastic,
    excluded,
    places,
    pool,
    training,
    wire,
)
from tests.unit.gloo.history import History, lost, ready, spec


def probes(job: History, since: int = 0) -> list[tuple[str, str]]:
    """Who was asked to try whom."""
    return [(probe.host, probe.target) for probe in job.of(do.Probe)[since:]]


def tried(job: History, since: int, *apart: str) -> list[do.Action]:
    """All who are asked to try others do so, from that question on; no two of `apart` find a way, however often they try."""
    new: list[do.Action] = []
    while since < len(job.of(do.Probe)):
        probe = job.of(do.Probe)[since]
        since += 1
        if not {probe.host, probe.target} <= {*apart}:
            new += job.play(on.HostProbed(probe.host, probe.target, probe.addresses[0], probe.agent))
        new += job.play(on.HostProbed(probe.host, probe.target, None, probe.agent))
        if apart and since == len(job.of(do.Probe)):
            job.now += 2.0
            new += job.play(on.Tick())
    return new


def test_hosts_of_a_round_that_failed_without_a_cause_try_each_other_again_and_one_is_left_out() -> None:
    job = training("a:1,b:1,c:1,d:1")
    tried(job, 0)
    before = len(job.of(do.Probe))
    job.play(on.WorkerAsked("b", 0, 0, 0, 5, "Connection timed out"))
    for host in "acd":
        job.ask(host, 0, 0, 5)
    assert set(probes(job, before)) == {(x, y) for x in "abcd" for y in "abcd" if x != y}
    actions = tried(job, before, "b", "d")
    assert [host for host, *_ in excluded(job)] == ["d"]
    assert places(actions) == {"a/0": 0, "b/0": 1, "c/0": 2}


def test_a_round_that_failed_for_a_known_cause_costs_no_probes() -> None:
    job = training("a:1,b:1")
    tried(job, 0)
    before = len(job.of(do.Probe))
    job.play(on.WorkerAsked("b", 0, 0, 0, 5, "Connection closed by peer"))
    job.exit("a", 0, 1)
    assert len(job.of(do.Probe)) == before


@pytest.mark.parametrize("late", ["10.0.0.1", None])
def test_what_was_found_of_an_agent_that_is_gone_is_nothing_against_the_next_one(late: str | None) -> None:
    job = History(spec("a", elastic=ElasticOptions(min_np=2, discovery_script="x")))
    job.play(on.Began(), discovered("a:1,b:1"), *ready("a", 1), *ready("b", 2))
    [asked] = [probe for probe in job.of(do.Probe) if probe.host == "b"]
    job.play(discovered("b:1"), on.HostClosed("a"), discovered("b:1,a:1"), *ready("a", 11))
    job.play(on.HostProbed("b", "a", late, asked.agent))
    for probe in job.of(do.Probe)[2:]:
        assert probe.addresses[0] != "10.0.0.1"
        job.play(on.HostProbed(probe.host, probe.target, probe.addresses[0], probe.agent))
    assert not excluded(job)
    assert [start.host for start in job.of(do.Start)] == ["b", "a"]


def test_a_host_that_was_excluded_for_its_ways_has_them_tried_again() -> None:
    """Where its agent is still there, since a worker of it does not end."""
    job = training("a:1,b:1,c:2", cooldown=(1.0, 60.0))
    tried(job, 0)
    before = len(job.of(do.Probe))
    job.play(on.WorkerAsked("b", 0, 0, 0, 5, "Connection timed out"))
    job.ask("a", 0, 0, 5)
    for slot in (0, 1):
        job.ask("c", slot, 0, 5)
    tried(job, before, "b", "c")
    assert [host for host, *_ in excluded(job)] == ["c"]
    job.exit("c", 0, None, signal.SIGTERM)
    before = len(job.of(do.Probe))
    while job.born("c", 0)[1] == 0:
        job.wait()
    job.ask("c", 0)
    for host in "ab":
        job.ask(host, 0, 1, 6)
    assert set(probes(job, before)) == {("b", "c"), ("c", "b")}
    assert len(excluded(job)) == 1


def test_hosts_that_have_no_cause_against_them_are_kept() -> None:
    job = elastic("a:1,b:1,c:1", min_np=2)
    arrive(job, *"abc")
    for name in "abc":
        job.ask(name, 0)
    tried(job, 0)
    job.play(on.WorkerAsked("b", 0, 0, 0, 5, "Connection timed out"))
    job.ask("a", 0, 0, 5)
    assert places(job.ask("c", 0, 0, 5) + wire(job)) == {"a/0": 0, "b/0": 1, "c/0": 2}


def test_a_host_that_is_left_out_for_others_is_replaced_at_once() -> None:
    job = elastic("a:1,b:1,c:1", np=2, max_np=2, min_np=1)
    for number, name in enumerate("ab", 1):
        job.play(*ready(name, number))
    tried(job, 0, "a", "b")
    assert [host for host, *_ in excluded(job)] == ["b"]
    assert [one.host.name for one in job.of(do.Connect)] == ["a", "b", "c"]


# Cuts that heal


def test_a_host_that_is_cut_while_it_tries_others_costs_none_of_them_its_place() -> None:
    job = elastic("a:1,b:1", min_np=2, cooldown=(1.0, 60.0))
    job.play(
        *ready("a", 1), *ready("b", 2), on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("b", "a", None)
    )
    job.now += 10.0
    job.play(on.Tick(), on.HostQuiet("a"))
    job.now += 15.0
    job.play(on.Tick(), on.HostAnswers("a"))
    assert not excluded(job)
    assert job.of(do.Start, job.play(on.HostProbed("a", "b", "10.0.0.2")))


def apart() -> History:
    """Host a can't reach b, and b reaches a."""
    job = elastic("a:1,b:1", min_np=1, cooldown=(1.0, 60.0))
    job.play(
        *ready("a", 1), *ready("b", 2), on.HostProbed("b", "a", "10.0.0.1"), on.HostProbed("b", "a", None)
    )
    job.play(on.HostProbed("a", "b", None))
    return job


def test_a_host_that_is_cut_while_it_is_tried_is_tried_again() -> None:
    job = apart()
    job.play(on.HostQuiet("b"))
    job.now += 15.0
    job.play(on.Tick())
    assert len(probes(job)) == 2
    job.play(on.HostAnswers("b"))
    assert not excluded(job)
    assert probes(job)[2:] == [("a", "b")]
    assert job.of(do.Start, tried(job, 2))


def test_a_cut_that_is_over_before_the_driver_could_know_of_it_costs_a_moment() -> None:
    job = apart()
    assert len(probes(job)) == 2
    job.wait()
    assert probes(job)[2:] == [("a", "b")]
    assert not excluded(job)
    assert job.of(do.Start, tried(job, 2))


@pytest.mark.parametrize("is_back", [True, False])
def test_a_port_that_refuses_because_its_agent_is_gone_is_nothing_against_who_tried_it(is_back: bool) -> None:
    """The end of the connection to that agent is seen later than the refusals; it may be that the connection alone is lost."""
    job = apart()
    job.wait()
    job.play(on.HostAway("b", "it broke"), on.HostProbed("a", "b", None))
    assert not excluded(job)
    if is_back:
        job.play(on.HostBack("b", 1.0))
        assert job.of(do.Start, tried(job, 3))
    else:
        job.play(lost("b"))
    assert [host for host, *_ in excluded(job)] == [] if is_back else ["b"]


@pytest.mark.parametrize("silent", ["a", "b"])
def test_the_one_that_does_not_answer_is_left_out_when_the_time_is_over(silent: str) -> None:
    job = apart()
    began = job.now
    job.play(on.HostQuiet(silent))
    while not excluded(job):
        job.wait()
    assert job.now == began + 30.0 + 16.0
    assert [host for host, *_ in excluded(job)] == [silent]


def test_the_one_that_alone_has_the_state_is_not_left_out() -> None:
    job = pool("a:1,b:1")
    tried(job, 0)
    job.play(discovered("a:2,b:1"))
    job.ask("a", 1)
    job.ask("a", 0, 0, 5)
    assert len(places(job.ask("b", 0, 0, 5))) == 3
    job.ask("b", 0, 1, 5, "Connection timed out")
    job.ask("a", 0, 1, 5)
    job.exit("a", 0, 1)
    before = len(probes(job))
    job.ask("a", 1, 1)
    tried(job, before, "a", "b")
    assert [host for host, *_ in excluded(job)] == ["a"]


def test_all_try_a_host_again_as_soon_as_it_answers() -> None:
    job = elastic("a:1,b:1,c:1", min_np=1)
    for number, name in enumerate("abc", 1):
        job.play(*ready(name, number))
    job.play(on.HostQuiet("a"), *[on.HostProbed(*pair, None) for pair in probes(job)])
    job.now += 15.0
    before = len(probes(job))
    job.play(on.Tick(), on.HostAnswers("a"))
    assert {("a", "b"), ("b", "a"), ("c", "a")} <= set(probes(job)[before:])


def test_a_host_that_never_says_whom_it_reaches_is_waited_for_as_long_as_for_a_lost_one() -> None:
    job = elastic("a:1,b:1,c:1", min_np=1)
    for number, name in enumerate("abc", 1):
        job.play(*ready(name, number))
    began = job.now
    for host, target in probes(job):
        if host != "c":
            job.play(on.HostProbed(host, target, f"10.0.0.{ord(target) - 96}"))
    while not excluded(job):
        job.wait()
    assert job.now == began + 30.0 + 16.0
    assert [host for host, *_ in excluded(job)] == ["c"]
    assert {start.host for start in job.of(do.Start)} == {"a", "b"}
