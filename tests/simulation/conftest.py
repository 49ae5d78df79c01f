"""How a history of the simulator is replayed: pytest tests/simulation/test_elastic.py --seed 4711."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay this one history of an elastic job")
