"""The verdict of a view: what its reader should know first."""

import pytest

from hvlaunch.view.verdict import verdict
from tests.unit.view.scenes import SCENES


@pytest.mark.parametrize("name", SCENES)
def test_the_verdict(name):
    scene = SCENES[name]
    assert verdict(scene.view()) == (scene.tone, scene.verdict, scene.detail)


def test_ranks_that_others_wait_for_are_marked():
    states = {row.rank: row.state for row in SCENES["hung"].view().ranks}
    assert {rank for rank, state in states.items() if state == "hanging"} == {3, 7}


def test_a_lost_host_stays_in_the_view():
    states = {row.host: row.state for row in SCENES["smaller"].view().hosts}
    assert states == {"gpu1": "ready", "gpu2": "excluded", "gpu3": "ready", "gpu4": "ready"}
