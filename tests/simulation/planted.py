"""Search for planted bugs: python -m tests.simulation.planted prints the law that finds each.

It tries seeds from 0 on, and takes some minutes.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hvlaunch.agent.wire.frames import BadFrame
from hvlaunch.engine.workers import InvalidTransition
from tests.simulation.bugs import BUGS, Bug
from tests.simulation.elastic_world import ElasticWorld
from tests.simulation.play import Play
from tests.simulation.takeover_bugs import TAKEOVER_BUGS
from tests.simulation.wired_elastic import WiredElasticWorld

__all__ = ["MOST_SEEDS", "Found", "first_found"]

MOST_SEEDS = 2000
_WIDTH = 60


class Found(NamedTuple):
    """The first seed that finds a bug, with the module of the broken law, and its words."""

    seed: int
    law: str
    words: str


def first_found(
    seeds: Iterable[int], words: str = "", make: Callable[[int], Play] = ElasticWorld
) -> Found | None:
    """Return the first history that breaks a law with these words."""
    for seed in seeds:
        try:
            make(seed).run()
        except (AssertionError, InvalidTransition, BadFrame) as error:
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
    planted = [(bug, make) for bugs, make in worlds for bug in bugs]
    for bug, make in planted:
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            found = first_found(range(MOST_SEEDS), bug.words, make)
        missed += found is None
        row = ("-", "nothing", "") if found is None else (found.seed, found.law, found.words[:_WIDTH])
        sys.stdout.write(f"| {bug.plant.__name__} | {row[1]} | {row[0]} | {row[2]} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(planted) - missed} of {len(planted)}\n")
    return missed


if __name__ == "__main__":
    sys.exit(main())
