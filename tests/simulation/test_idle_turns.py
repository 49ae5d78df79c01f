"""Idle compaction: an engine that gets one summary is in the same state as after the idle turns."""

import json

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.codec import decode, encode
from hvlaunch.engine.engine import Engine
from hvlaunch.job import JobSpec
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.snapshots import snapshot
from tests.simulation.world import World

SEEDS = 40
MANY = 5000
SHARDS = 20
LEADS_ELSEWHERE = "a summary of idle turns leads elsewhere"


class Pair:
    """An engine with all turns, and one with a summary for each run of idle ones."""

    def __init__(self, spec: JobSpec) -> None:
        self.whole, self._short = (Engine(spec, 4711) for _ in range(2))
        self.saved = 0
        self._idle = 0
        self._now = 0.0

    def handle(self, event: on.Event, now: float) -> list[do.Action]:
        lull = json.dumps(encode(on.Event, self.whole.idle_summary())) if self._idle else ""
        actions = self.whole.handle(event, now)
        if self.whole.is_idle:
            self._idle, self._now = self._idle + 1, now
            return actions
        if self._idle:
            assert self._short.handle(decode(on.Event, json.loads(lull)), self._now) == [], LEADS_ELSEWHERE
        assert self._short.handle(event, now) == actions, LEADS_ELSEWHERE
        if self._idle:
            assert snapshot(self._short) == snapshot(self.whole), LEADS_ELSEWHERE
        self.saved, self._idle = self.saved + self._idle, 0
        return actions


def passed_over(world: Play) -> int:
    """Return the number of turns that can be compacted. A Tick comes before each, as in a driver that watches hosts."""
    world.run()
    pair = Pair(world.spec)
    for now, event, actions in world.turns:
        deadline = pair.whole.deadline
        if not isinstance(event, on.Began) and (deadline is None or now < deadline):
            assert pair.handle(on.Tick(), now) == []
        assert pair.handle(event, now) == actions
    return pair.saved


def test_idle_turns_of_elastic_jobs_can_be_compacted() -> None:
    saved = sum(passed_over(ElasticWorld(seed)) for seed in range(SEEDS))
    assert saved > 20 * SEEDS


def test_idle_turns_of_static_jobs_can_be_compacted() -> None:
    saved = sum(passed_over(World(seed, faults=0.3)) for seed in range(SEEDS))
    assert saved > 5 * SEEDS


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_idle_turns_of_many_jobs_can_be_compacted(shard: int) -> None:
    for seed in range(shard, MANY, SHARDS):
        passed_over(ElasticWorld(seed))
        passed_over(World(seed, faults=0.3))
