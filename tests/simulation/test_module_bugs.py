"""Bugs planted in every module of the engine: each is found by a law of the simulator."""

from pathlib import Path

import pytest

from hvlaunch import engine
from tests.simulation.module_bugs import MODULE_BUGS, ModuleBug
from tests.simulation.planted import GAMES, first_failed

NEXT_FEW = 3
SEARCHED = 2000


@pytest.mark.parametrize("bug", MODULE_BUGS, ids=lambda bug: f"{bug.module}: {bug.plant.__name__}")
def test_a_bug_of_a_module_is_found_by_its_law(bug: ModuleBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    assert first_failed(range(bug.seed, bug.seed + NEXT_FEW), bug.words, GAMES[bug.game])


@pytest.mark.long
@pytest.mark.parametrize("bug", MODULE_BUGS, ids=lambda bug: f"{bug.module}: {bug.plant.__name__}")
def test_a_bug_of_a_module_is_found_from_the_first_seed_on(
    bug: ModuleBug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The normal run plays as many seeds: a bug like this one is found there, too."""
    bug.plant(monkeypatch)
    assert first_failed(range(SEARCHED), bug.words, GAMES[bug.game])


def test_every_module_of_the_engine_has_a_planted_bug() -> None:
    modules = {path.stem for path in Path(engine.__file__).parent.glob("*.py")} - {"__init__"}
    assert {bug.module for bug in MODULE_BUGS} == modules


def test_the_games_find_nothing_in_the_engine_itself() -> None:
    for name, play in GAMES.items():
        assert first_failed(range(NEXT_FEW), "", play) is None, name
