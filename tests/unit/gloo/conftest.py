"""What holds for all histories."""

import json
from collections.abc import Iterator

import pytest

from hvlaunch.engine import replay

from .history import History


@pytest.fixture(autouse=True)
def journals_replay() -> Iterator[None]:
    """Whatever a test plays to an engine, its journal leads another engine to the same actions, and the same state."""
    History.all.clear()
    yield
    for history in History.all:
        if history.is_journal_whole:
            engine = replay(json.loads(json.dumps(history.journal)))
            assert (engine.phase, engine.deadline) == (history.engine.phase, history.engine.deadline)
