"""Lost connections and replaced drivers at any moment of static and elastic jobs."""

from collections import Counter
from collections.abc import Callable

import pytest

from hvlaunch.agent.wire.frames import BadFrame
from tests.simulation.bugs import Bug
from tests.simulation.planted import first_found
from tests.simulation.takeover_bugs import TAKEOVER_BUGS
from tests.simulation.test_static import check
from tests.simulation.wired import Wired
from tests.simulation.wired_elastic import WiredElasticWorld
from tests.simulation.wired_static import WiredStaticWorld

SEEDS = 200
MANY = 20_000
SHARDS = 10
SHOWN = 120
ENOUGH = 250
FAULTS = (0.0, 0.02, 0.1)
ONCE_NOT_CLEAN = (701372, 701880, 2001808, 2007526, 5000728, 5005343, 5010137)
"""Seeds of longer runs that found a defect of the engine, of the world or of a law."""


def static(seed: int) -> WiredStaticWorld:
    return WiredStaticWorld(seed, faults=FAULTS[seed % len(FAULTS)])


def play(world: Wired, seed: int) -> Wired:
    """Play the world. Raises AssertionError with the history."""
    try:
        result = world.run()
        if isinstance(world, WiredStaticWorld) and result is not None:
            check(world, result)
    except (AssertionError, BadFrame) as error:
        history = "\n".join(world.history[-SHOWN:])
        raise AssertionError(f"{error}\n{history}\nseed {seed}") from error
    return world


def test_static_jobs() -> None:
    for seed in range(SEEDS):
        play(static(seed), seed)


def test_elastic_jobs(request: pytest.FixtureRequest) -> None:
    chosen = request.config.getoption("--seed", default=None)
    seeds = range(SEEDS) if chosen is None else [chosen]
    worlds = [play(WiredElasticWorld(seed), seed) for seed in seeds]
    counts: Counter[str] = Counter()
    for world in worlds:
        counts.update(world.breakdowns.counts)
    assert chosen is not None or min(counts.values()) > SEEDS / 30
    codes = [None if world.result is None else world.result.exit_code for world in worlds]
    assert chosen is not None or len(codes) / 2 < codes.count(0) < len(codes)


@pytest.mark.parametrize(
    ("make", "seed"), [(static, 2001187), *((WiredElasticWorld, seed) for seed in ONCE_NOT_CLEAN)]
)
def test_seeds_that_once_failed(make: Callable[[int], Wired], seed: int) -> None:
    play(make(seed), seed)


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_jobs(shard: int) -> None:
    for seed in range(shard, MANY, SHARDS):
        play(static(seed), seed)
        play(WiredElasticWorld(seed), seed)


def test_the_same_seed_is_the_same_history() -> None:
    assert play(WiredElasticWorld(7), 7).history == play(WiredElasticWorld(7), 7).history


@pytest.mark.parametrize("bug", TAKEOVER_BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    assert first_found(range(bug.seed, bug.seed + ENOUGH), bug.words, WiredElasticWorld)
