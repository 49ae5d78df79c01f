"""`--rewrite` writes the stories anew, as etcd raft's tests do."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the engine's actions into the stories")
