"""The journals of simulated jobs, replayed by another engine, give the same actions."""

import json
from collections.abc import Sequence

import pytest

from hvlaunch.engine import replay
from hvlaunch.engine.codec import Diverged, Entry, begin_entry, turn_entry
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.world import World

SEEDS = 300
MANY = 1000
SHARDS = 5
SPOILT = 20


def check(world: Play) -> None:
    world.run()
    entries = [begin_entry("0", "j0b", world.spec, 4711)]
    entries += [turn_entry(event, actions, now) for now, event, actions in world.turns]
    engine = replay(json.loads(json.dumps(entries)))
    assert (engine.phase, engine.deadline) == (world.engine.phase, None)


def check_refused(world: Play) -> None:
    """Check that a journal is refused that lacks an action, or has one of another class with the same fields."""
    world.run()
    turns = [turn_entry(event, actions, now) for now, event, actions in world.turns]
    begin = begin_entry("0", "j0b", world.spec, 4711)
    for spoilt in (_without_last_action(turns), _with_other_class(turns)):
        assert _is_refused([begin, *spoilt]), "a spoilt journal is replayed"


def _is_refused(entries: Sequence[Entry]) -> bool:
    try:
        replay(json.loads(json.dumps(entries)))
    except Diverged:
        return True
    return False


def _without_last_action(turns: Sequence[Entry]) -> list[Entry]:
    number = max(index for index, turn in enumerate(turns) if turn["actions"])
    spoilt = {**turns[number], "actions": turns[number]["actions"][:-1]}
    return [*turns[:number], spoilt, *turns[number + 1 :]]


def _with_other_class(turns: Sequence[Entry]) -> list[Entry]:
    """Name a release an abandonment: both have the host's name only."""
    text = json.dumps(turns)
    assert '"is": "Release"' in text
    return list(json.loads(text.replace('"is": "Release"', '"is": "Abandon"')))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_elastic_jobs(shard: int) -> None:
    for seed in range(shard, SEEDS, SHARDS):
        check(ElasticWorld(seed))


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_elastic_jobs(shard: int) -> None:
    for seed in range(SEEDS + shard, MANY, SHARDS):
        check(ElasticWorld(seed))


def test_spoilt_journals_are_refused() -> None:
    for seed in range(SPOILT):
        check_refused(World(seed, faults=0.0))


def test_static_jobs() -> None:
    for seed in range(MANY):
        check(World(seed, faults=0.3))
