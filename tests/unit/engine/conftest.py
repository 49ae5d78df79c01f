"""`--rewrite` writes the stories anew, as etcd raft's tests do."""

from pathlib import Path

import pytest

from tests.unit.engine.storyteller import rewritten

STORIES = Path(__file__).parent / "stories"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the engine's actions into the stories")


def pytest_collection(session: pytest.Session) -> None:
    """Rewrite before the stories are read: they are the parameters of a test."""
    if session.config.getoption("--rewrite", default=False):
        for path in STORIES.glob("*.txt"):
            path.write_text(rewritten(path))
