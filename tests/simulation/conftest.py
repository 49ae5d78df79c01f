"""Replay one history of the simulator: pytest tests/simulation/test_elastic.py --seed 4711."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this one history of an elastic job")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Exclude the simulator from coverage: it would take three times as long, and covers nothing new."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.no_cover)
