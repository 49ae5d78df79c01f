"""Search for planted bugs: python -m tests.simulation.planted prints the law that finds each.

It tries seeds from 0 on, and takes some minutes.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.engine.codec import BadData, Diverged
from hvlaunch.engine.workers import InvalidTransition
from tests.simulation.bugs import BUGS, Bug
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.module_bugs import MODULE_BUGS, Game
from tests.simulation.play import Play
from tests.simulation.role_world import RoleWorld
from tests.simulation.takeover_bugs import TAKEOVER_BUGS
from tests.simulation.test_idle_turns import passed_over
from tests.simulation.test_replay import check as check_replay
from tests.simulation.test_replay import check_refused
from tests.simulation.test_static import check as check_static
from tests.simulation.wired_elastic import WiredElasticWorld
from tests.simulation.world import World
from tests.unit.engine.storyteller import played, read

__all__ = ["GAMES", "MOST_SEEDS", "Found", "first_failed", "first_found"]

MOST_SEEDS = 2000
_WIDTH = 60
_FAULTS = (0.0, 0.3)
_STORIES = Path(__file__).parents[1] / "unit/engine/stories"
_TOLD = ("elastic.txt", "elastic_ends.txt", "moves.txt", "networks.txt", "replaced.txt")
"""Stories of what no game has brought about."""


class Found(NamedTuple):
    """The first seed that finds a bug, with the module of the broken law, and its words."""

    seed: int
    law: str
    words: str


def _play_static(seed: int) -> None:
    world = World(seed, faults=_FAULTS[seed % 2], failures=0.5)
    check_static(world, world.run())


def _tell_stories(_seed: int) -> None:
    for story in (story for name in _TOLD for story in read(_STORIES / name)):
        expected = [(command, list(lines)) for command, lines in story.steps]
        assert list(played(story)) == expected, f"the story is false: {story.title}"


def _play_roles(seed: int) -> None:
    world = RoleWorld(seed, faults=_FAULTS[seed % 2])
    result = world.run()
    if result is not None:
        world.check(result)


class _PatientWorld(ElasticWorld):
    """A world whose driver waits for silent hosts until the end of the lease."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.suspects = False


GAMES: Mapping[Game, Callable[[int], object]] = {
    "elastic": lambda seed: ElasticWorld(seed).run(),
    "elastic without suspicion": lambda seed: _PatientWorld(seed).run(),
    "takeovers": lambda seed: WiredElasticWorld(seed).run(),
    "static": _play_static,
    "idle turns": lambda seed: passed_over(ElasticWorld(seed)),
    "replay": lambda seed: check_replay(ElasticWorld(seed)),
    "stories": _tell_stories,
    "roles": _play_roles,
    "spoilt journals": lambda seed: check_refused(World(seed, faults=0.0)),
}
"""What finds the bugs of the engine's modules."""


def first_found(
    seeds: Iterable[int], words: str = "", make: Callable[[int], Play] = ElasticWorld
) -> Found | None:
    """Return the first history that breaks a law with these words."""
    return first_failed(seeds, words, lambda seed: make(seed).run())


def first_failed(seeds: Iterable[int], words: str, play: Callable[[int], object]) -> Found | None:
    """Return the first seed whose play fails with these words."""
    for seed in seeds:
        try:
            play(seed)
        except (AssertionError, InvalidTransition, BadData, BadFrame, Diverged) as error:
            if words in str(error):
                module_path = traceback.extract_tb(error.__traceback__)[-1].filename
                return Found(seed, Path(module_path).stem, str(error))
    return None


def main() -> int:
    """Print the table; return the number of bugs that no seed finds."""
    missed = 0
    worlds: list[tuple[Sequence[Bug], Callable[[int], Play]]] = [
        (BUGS, ElasticWorld),
        (TAKEOVER_BUGS, WiredElasticWorld),
    ]
    planted = [(bug.plant, bug.words, _runs(make)) for bugs, make in worlds for bug in bugs]
    planted += [(bug.plant, bug.words, GAMES[bug.game]) for bug in MODULE_BUGS]
    for plant, words, play in planted:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            found = first_failed(range(MOST_SEEDS), words, play)
        missed += found is None
        row = ("-", "nothing", "") if found is None else (found.seed, found.law, found.words[:_WIDTH])
        sys.stdout.write(f"| {plant.__name__} | {row[1]} | {row[0]} | {row[2]} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(planted) - missed} of {len(planted)}\n")
    return missed


def _runs(make: Callable[[int], Play]) -> Callable[[int], object]:
    return lambda seed: make(seed).run()


if __name__ == "__main__":
    sys.exit(main())
