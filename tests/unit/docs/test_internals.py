"""The developers' pages say what the code does: pictures of states, the length of pages, the words."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import pytest

from hvlaunch.engine import events
from hvlaunch.engine.hosts import HOST_TRANSITIONS
from hvlaunch.engine.round import ROUND_TRANSITIONS
from hvlaunch.engine.workers import TRANSITIONS
from tests.house import glossary

PAGES = Path(__file__).parents[3] / "docs" / "internals"
PRODUCT = Path(__file__).parents[3] / "hvlaunch"
MOST_LINES = 150
MOST_LINES_OF_THE_MAP = 120
MOST_WORDS = 110


def section(title: str) -> str:
    return (PAGES / "states.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def drawn(title: str) -> set[tuple[str, str, str]]:
    """Return the steps of a section's table."""
    steps = set()
    for source, triggers, target in re.findall(
        r"^\| ([\w, ]+) \| ([\w, ]+) \| (\w+) \|$", section(title), re.MULTILINE
    ):
        steps |= {
            (state, trigger, target) for state in source.split(", ") for trigger in triggers.split(", ")
        }
    return steps - {("from", "trigger", "to"), ("from", "step", "to")}


def named(table: Mapping[Enum, Mapping[Enum, Enum]]) -> set[tuple[str, str, str]]:
    return {
        (state.name, trigger.name, after.name)
        for state, ways in table.items()
        for trigger, after in ways.items()
    }


@pytest.mark.parametrize(
    ("title", "table"), [("A worker", TRANSITIONS), ("A round", ROUND_TRANSITIONS)], ids=["worker", "round"]
)
def test_the_steps_on_the_page_are_those_of_the_engine(
    title: str, table: Mapping[Enum, Mapping[Enum, Enum]]
) -> None:
    assert drawn(title) == named(table)


def test_the_steps_of_a_host_on_the_page_are_those_of_the_engine() -> None:
    steps = {
        (state.name, step, after.name)
        for step, (states, after) in HOST_TRANSITIONS.items()
        for state in states
    }
    assert drawn("A host") == steps


@pytest.mark.parametrize("title", ["A worker", "A round", "A host"])
def test_each_state_of_a_table_is_in_the_picture(title: str) -> None:
    picture = re.findall(r"```text\n(.*?)```", section(title), re.DOTALL)[0]
    states = {state for source, _, target in drawn(title) for state in (source, target)}
    assert states == set(re.findall(r"\b[A-Z]{4,}\b", picture))


def test_events_that_the_page_names_exist() -> None:
    assert {"HostAway", "HostBack", "HostGone"} <= set(events.__all__)
    for name in re.findall(r"`(Host\w+)`", (PAGES / "states.md").read_text()):
        assert name in events.__all__


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_a_page_can_be_read_in_one_sitting(page: Path) -> None:
    most = MOST_LINES_OF_THE_MAP if page.name == "map.md" else MOST_LINES
    assert page.read_text().count("\n") <= most


def test_the_glossary_has_each_word_once_and_few() -> None:
    words = glossary()
    assert len(words) == len(set(words))
    assert 40 < len(words) <= MOST_WORDS


def test_each_page_can_be_reached_from_the_map() -> None:
    links = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (PAGES / "map.md").read_text()))
    assert links == {page.name for page in PAGES.glob("*.md")} - {"map.md"}


def walks() -> list[tuple[str, str]]:
    """Return the heading and the text of each walk."""
    parts = (PAGES / "walks.md").read_text().split("\n## ")[1:]
    return [(heading, text) for heading, _, text in (part.partition("\n") for part in parts)]


@pytest.mark.parametrize(("heading", "text"), walks(), ids=[heading for heading, _ in walks()])
def test_a_walk_lists_as_many_files_as_its_heading_says_and_each_exists(heading: str, text: str) -> None:
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert [file for file in files if not (PRODUCT / file).is_file()] == []
    assert sorted(files) == sorted(set(files))
    assert re.findall(r" \((\d+) files; \d+ before\)$", heading) == [str(len(files))]


def test_there_are_six_walks() -> None:
    assert len(walks()) == 6
