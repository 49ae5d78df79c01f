"""Thousands of static jobs in which things go wrong: each ends, rightly, and leaves no worker."""

import re

import pytest

from hvlaunch.job import JobResult
from tests.simulation.world import World

SEEDS = 2000


def check(world: World, result: JobResult) -> None:
    assert not [host.name for host in world.hosts.values() if host.live], "workers are left"
    codes = {int(found[1]) for cause in world.broken if (found := re.match(r"exit (\d+)", cause))}
    if not world.broken:
        assert result.exit_code == 0
    if result.exit_code == 0:
        ends = [end for host in world.hosts.values() for end in host.ends.values()]
        assert len(ends) == sum(host.slots or 0 for host in world.spec.hosts)
        assert set(ends) == {(0, None)}
        assert result.failure is None
        assert result.error is None
    elif result.interrupted is not None:
        assert result.exit_code == 128 + result.interrupted
        assert "interrupt" in world.broken
    elif result.error is not None:
        assert result.exit_code == 69
        assert any(cause.startswith(("lose", "connect")) for cause in world.broken)
    else:
        assert result.failure is not None
        assert result.exit_code in codes
    assert len({end.rank for end in result.exits}) == len(result.exits)


@pytest.mark.parametrize("faults", [0.0, 0.02, 0.3])
def test_every_job_ends_rightly(faults: float) -> None:
    for seed in range(SEEDS):
        world = World(seed, faults=faults)
        try:
            check(world, world.run())
        except AssertionError as error:
            history = "\n".join(world.history)
            raise AssertionError(f"seed {seed}, faults {faults}: {error}\n{history}") from error


def test_the_same_seed_is_the_same_history() -> None:
    first, second = World(7, faults=0.3), World(7, faults=0.3)
    first.run()
    second.run()
    assert first.history == second.history
