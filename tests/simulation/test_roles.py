"""Thousands of jobs with roles: restarts touch their own role alone, are bounded, and every job ends."""

from collections.abc import Callable

import pytest

from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.engine.lifecycle import Lifecycle
from hvlaunch.engine.roles import RolePolicies
from hvlaunch.engine.round import Restarts
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Wait
from tests.simulation.bugs import nothing_begins
from tests.simulation.role_world import RoleWorld, WiredRoleWorld
from tests.simulation.test_replay import check as check_replay

SEEDS = 500
MANY = 5000
FAULTS = {RoleWorld: (0.0, 0.02, 0.3), WiredRoleWorld: (0.0, 0.02, 0.1)}


def world_of(kind: type[RoleWorld], seed: int) -> RoleWorld:
    return kind(seed, faults=FAULTS[kind][seed % 3])


def play(world: RoleWorld) -> RoleWorld:
    """Play the world. Raises AssertionError with the history."""
    try:
        result = world.run()
        if result is not None:
            world.check(result)
    except (AssertionError, BadFrame) as error:
        history = "\n".join(world.history[-120:])
        raise AssertionError(f"seed {world.seed}, faults {world.faults}: {error}\n{history}") from error
    return world


def test_every_job_ends_and_restarts_stay_in_their_role() -> None:
    worlds = [play(world_of(RoleWorld, seed)) for seed in range(SEEDS)]
    codes = [world.result.exit_code for world in worlds if world.result is not None]
    assert SEEDS / 5 < codes.count(0) < SEEDS
    assert sum(world.restarts for world in worlds) > SEEDS


def test_lost_drivers_and_connections() -> None:
    worlds = [play(world_of(WiredRoleWorld, seed)) for seed in range(SEEDS)]
    assert sum(world.restarts for world in worlds) > SEEDS / 4


def test_a_journal_gives_the_same_actions() -> None:
    for seed in range(SEEDS // 2):
        check_replay(world_of(RoleWorld, seed))


@pytest.mark.long
@pytest.mark.parametrize("kind", [RoleWorld, WiredRoleWorld])
def test_many(kind: type[RoleWorld]) -> None:
    for seed in range(SEEDS, SEEDS + MANY):
        play(world_of(kind, seed))


def restarts_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "failed", lambda *_, **__: None)


def the_rest_of_the_role_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolePolicies, "_await", lambda self, unit, now: self._waits.begin(Wait.RESTART, unit, now))


def all_hosts_are_stopped(patch: pytest.MonkeyPatch) -> None:
    failed = RolePolicies._failed

    def wrong(self: RolePolicies, unit: range, *more: object) -> object:
        return failed(self, range(unit.stop), *more)  # type: ignore[arg-type]

    patch.setattr(RolePolicies, "_failed", wrong)


def a_job_ends_before_a_restart(patch: pytest.MonkeyPatch) -> None:
    close_if_over = Lifecycle.close_if_over

    def wrong(self: Lifecycle, now: float) -> object:
        self._rounds.restarting.clear()
        return close_if_over(self, now)

    patch.setattr(Lifecycle, "close_if_over", wrong)


def only_the_first_starts_again(patch: pytest.MonkeyPatch) -> None:
    restart = Rounds.restart
    patch.setattr(Rounds, "restart", lambda self, ranks, now: restart(self, ranks[:1], now))


@pytest.mark.parametrize(
    "plant",
    [
        restarts_without_end,
        the_rest_of_the_role_stays,
        all_hosts_are_stopped,
        a_job_ends_before_a_restart,
        only_the_first_starts_again,
        lambda patch: nothing_begins(patch, Wait.RESTART),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_job_ends_and_restarts_stay_in_their_role()
