"""The journals of simulated jobs, replayed by another engine, give the same actions."""

import json

import pytest

from hvlaunch.engine import replay
from hvlaunch.engine.entries import begin_entry, turn_entry
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.world import World

SEEDS = 1000
SHARDS = 10


def check(world: Play) -> None:
    world.run()
    entries = [begin_entry("0", "j0b", world.spec, 4711)]
    entries += [turn_entry(event, actions, now) for now, event, actions in world.turns]
    engine = replay(json.loads(json.dumps(entries)))
    assert (engine.phase, engine.deadline) == (world.engine.phase, None)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_elastic_jobs(shard: int) -> None:
    for seed in range(shard, SEEDS, SHARDS):
        check(ElasticWorld(seed))


def test_static_jobs() -> None:
    for seed in range(SEEDS):
        check(World(seed, faults=0.3))
