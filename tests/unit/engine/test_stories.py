"""Every story is still true: the engine wants what the text says, action by action."""

import json
from pathlib import Path

import pytest

from hvlaunch.engine import replay
from tests.unit.engine.storyteller import Story, played, read, rewritten
from tests.unit.gloo.history import History

HERE = Path(__file__).parent / "stories"
STORIES = [(path, story) for path in sorted(HERE.glob("*.txt")) for story in read(path)]


@pytest.mark.parametrize(
    ("path", "story"), STORIES, ids=[f"{path.stem}: {story.title}" for path, story in STORIES]
)
def test_the_engine_does_what_the_story_says(path: Path, story: Story) -> None:
    History.all.clear()
    assert list(played(story)) == [(command, list(lines)) for command, lines in story.steps]
    # The journal alone must lead another engine to the same actions, as a successor needs it.
    for history in History.all:
        engine = replay(json.loads(json.dumps(history.journal)))
        assert (engine.phase, engine.deadline) == (history.engine.phase, history.engine.deadline)


def test_a_false_story_is_noticed() -> None:
    _path, story = STORIES[0]
    (*before, (command, lines)) = story.steps
    false = story._replace(steps=(*before, (command, (*lines, "Release('z')"))))
    assert list(played(false)) != [(command, list(lines)) for command, lines in false.steps]


def test_rewriting_true_stories_changes_nothing() -> None:
    for path in HERE.glob("*.txt"):
        assert rewritten(path) == path.read_text()
