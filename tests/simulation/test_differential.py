"""The differential simulation: an engine equals itself, and a planted change is found."""

from collections.abc import Callable

import pytest

from hvlaunch.engine import hosts, workers
from hvlaunch.engine.round import Restarts
from hvlaunch.engine.waits import Wait
from tests.simulation.bugs import nothing_begins
from tests.simulation.differential import KINDS, compare, engine_before

SEEDS = 10
MOST_SEEDS = 200


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_equals_itself(kind: str) -> None:
    with engine_before(None) as package:
        outcome = compare(package, kind, range(SEEDS))
    assert outcome.different is None, outcome.words
    assert outcome.turns > 10 * SEEDS


def probes_have_more_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hosts, "_PROBING_TIME", 8.5)


def workers_have_a_second_more_to_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(workers, "_PATIENCE", 11.0)


def a_cause_is_never_waited_for(patch: pytest.MonkeyPatch) -> None:
    nothing_begins(patch, Wait.SETTLING)


def a_restart_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restarts, "failed", lambda self, now, *, fruitful, host=None: None)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (probes_have_more_time, "elastic"),
        (workers_have_a_second_more_to_end, "elastic, with takeovers"),
        (a_cause_is_never_waited_for, "static, workers fail"),
        (a_restart_is_not_counted, "elastic"),
    ],
)
def test_a_planted_change_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_before(None) as package:
        plant(monkeypatch)
        outcome = compare(package, kind, range(MOST_SEEDS))
    assert outcome.different is not None
    assert f"{kind}, seed " in outcome.words
    assert f", turn {outcome.different.turn}, at " in outcome.words
