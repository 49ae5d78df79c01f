"""The totals of random jobs: the parts of a job's time are all of it, whatever happens."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.engine import events as on
from hvlaunch.report.bill import make_bill
from hvlaunch.watch.overview import Totals
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.world import World

WORLDS: list[Callable[[int], Play]] = [ElasticWorld, lambda seed: World(seed, faults=0.3)]


def totals_of(world: Play, chance: random.Random) -> tuple[Totals, float]:
    """Watch the world's turns, with steps and hangs between them; check the totals on the way."""
    totals, now, began = Totals(), 0.0, world.turns[0][0]
    between: list[Callable[[], on.Event]] = [
        lambda: on.StepReached(chance.randrange(3), 1),
        lambda: on.JobHangs(chance.random() * 90, (0,), ""),
        on.JobGoesOn,
    ]
    for now, event, actions in world.turns:
        totals.watch(event, actions, now)
        if chance.random() < 0.1:
            totals.watch(chance.choice(between)(), [], now)
        if chance.random() < 0.1:
            check(totals, now + chance.random(), began, now)
    return totals, now


def check(totals: Totals, at: float, began: float, last: float) -> None:
    found = totals.at(at)
    parts = found["parts"]
    assert found["seconds"] == pytest.approx(at - began)
    assert sum(parts.values()) == pytest.approx(found["seconds"])
    assert min(parts.values()) >= 0
    assert 0 <= found["useful_seconds"] <= at - began + 1e-6
    for entry in found["workers"]:
        assert entry["workers"] > 0
        assert 0 <= entry["seconds"] <= at - began + 1e-6
    bill = make_bill(found, lambda _host, workers: workers)
    assert bill.wall_seconds == pytest.approx(at - began, rel=0.01, abs=0.01)
    assert bill.gpu_hours is not None
    assert bill.idle_gpu_hours is not None
    assert 0 <= bill.idle_gpu_hours <= bill.gpu_hours
    assert last <= at


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(WORLDS), st.randoms(use_true_random=False))
def test_the_parts_of_a_random_job_are_all_of_its_time(
    seed: int, make: Callable[[int], Play], chance: random.Random
) -> None:
    world = make(seed)
    world.run()
    totals, now = totals_of(world, chance)
    check(totals, now, world.turns[0][0], now)
