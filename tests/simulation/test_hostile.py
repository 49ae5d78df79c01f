"""Thousands of jobs with events in orders that no driver should produce: no exception, no order to a host that is gone, one right end."""

from collections import Counter
from collections.abc import Callable

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.hosts import PoolHost, gone_unasked
from hvlaunch.engine.lifecycle import Lifecycle
from hvlaunch.engine.policy import Decision
from hvlaunch.engine.workers import Workers
from hvlaunch.errors import Defect, Problem
from tests.simulation.bugs import instead
from tests.simulation.hostile import HostileGame
from tests.unit.gloo.history import History, hosts, spec

SEEDS = 400
MANY = 20_000


def test_a_job_outlives_events_in_any_order() -> None:
    codes = Counter(HostileGame(seed).play().exit_code for seed in range(SEEDS))
    # Half of the jobs must end well, or the strays hide what they do.
    assert codes[0] > SEEDS / 3
    assert {1, 3, 69, 75} <= codes.keys()


@pytest.mark.long
def test_a_job_outlives_events_in_any_order_for_long() -> None:
    for seed in range(MANY):
        HostileGame(seed).play()


def test_the_strays_are_of_every_kind() -> None:
    kinds = Counter[str]()
    for seed in range(100):
        game = HostileGame(seed)
        game.play()
        kinds.update(type(event).__name__ for event in game.events)
    never = {
        "Lull",
        "DriverReplaced",
        "ThreadFailed",
        "Interrupted",
    }  # of replays and successors, of defects, rare
    assert {kind.__name__ for kind in on.Event.__args__} - never <= kinds.keys()


def a_job_begins_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "has_begun", property(lambda _: False, lambda _, __: None), raising=False)


def an_earlier_worker_ends_the_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Workers, "find", lambda self, seat, _start: self.at(seat))


def an_unasked_end_of_an_agent_is_no_loss(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        right: Callable[..., Decision], self: Engine, host: PoolHost, problem: Problem, now: float
    ) -> Decision:
        if problem != gone_unasked(host.name):
            return right(self, host, problem, now)
        self._gone(host, now)
        return Decision()

    instead(patch, Engine, "_host_failed", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        a_job_begins_twice,
        an_earlier_worker_ends_the_newest,
        an_unasked_end_of_an_agent_is_no_loss,
    ],
)
def test_a_planted_bug_falls(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, Defect, LookupError)):
        for seed in range(SEEDS):
            HostileGame(seed).play()


def test_an_address_that_was_not_asked_for_is_ignored() -> None:
    job = History(spec("a:1,b:1"))
    job.connect()
    job.play(on.RendezvousReached("a", "10.0.0.100"), on.RendezvousReached("b", "10.0.0.100"))
    job.play(on.HostProbed("b", "a", "10.0.0.9"), on.HostProbed("b", "a", "10.0.0.1"))
    job.play(on.HostProbed("a", "b", "10.0.0.2"))
    assert [start.host for start in job.of(do.Start)] == ["a", "b"]


def test_a_host_that_closes_before_its_workers_end_is_lost() -> None:
    job = History(spec("a:1"))
    job.connect()
    job.wire()
    job.play(on.HostClosed("a"))
    (finish,) = job.of(do.Finish)
    assert finish.result.exit_code == 69
    assert finish.result.error == gone_unasked("a")


def test_a_list_of_hosts_changes_no_static_job() -> None:
    job = History(spec("a:1,b:1"))
    job.play(on.Began())
    job.play(on.HostsDiscovered(hosts("b:1")), on.DiscoveryFailed(gone_unasked("a")))
    assert [action for action in job.actions if not isinstance(action, do.Connect)] == []
    assert [host.name for host in job.engine.pool if host.listed] == ["a", "b"]
