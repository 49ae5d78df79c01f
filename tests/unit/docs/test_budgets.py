"""Pages for users are few, short, and in short sentences."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.blocks import ROOT

DOCS = ROOT / "docs"
FOR_DEVELOPERS = {"interfaces", "internals"}
GENERATED = {
    "reference/coming-from.md",
    "reference/errors-python.md",
    "reference/errors.md",
    "reference/json.md",
    "reference/options.md",
    "reference/programs.md",
}
MOST_WORDS = {
    "": 25_000,
    "start.md": 550,
    "guides": 12_600,
    "from": 820,
    "explain": 2_800,
    "reference": 8_080,
}
"""By section; "" is all together."""
MOST_WORDS_OF_A_PAGE = 1_500
MOST_WORDS_OF_A_LAUNCHER = 200
"""About a screen: a page of docs/from/."""
MOST_WORDS_OF_README = 720
MOST_LINES_OF_README = 150
MOST_WORDS_OF_A_SENTENCE = 25
"""On average."""
MOST_PAGES = 60

FOREIGN = re.compile(
    r"\bas ever\b|(?:is|are) told|comes? to|(?:go|goes|got|gets|looks?) on|but for|and (?:its|the) like|by intent|nobody knows"
    r"|(?:^|[.:;] )(?:Who|Whoever|What is|Of the)\b",
    re.MULTILINE,
)
"""Turns of phrase that are no technical English; house_limits.json counts others."""

_SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z\"*])")
_PARAGRAPH = re.compile(r"\n\s*\n|\n\s*(?:- |\d+\. )")


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if name_of(page).partition("/")[0] not in FOR_DEVELOPERS and name_of(page) not in GENERATED
]


def words(text: str) -> int:
    """Count what has a letter or a digit, in tables and code too; the lines of a table are no words."""
    return sum(any(sign.isalnum() for sign in word) for word in text.split())


def prose_of(text: str) -> str:
    """Return what is no code, and where links lead."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`]*`", "code", text))


def sentences(text: str) -> list[int]:
    """Return the lengths of sentences outside of tables and headings."""
    prose = re.sub(r"^[|#<!].*$", "", prose_of(text), flags=re.MULTILINE)
    lengths = [
        words(sentence) for part in _PARAGRAPH.split(prose) for sentence in _SENTENCE.split(part.strip())
    ]
    return [length for length in lengths if length]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text()
    most = MOST_WORDS_OF_A_LAUNCHER if name_of(page).startswith("from/") else MOST_WORDS_OF_A_PAGE
    assert words(text) <= most
    lengths = sentences(text)
    assert sum(lengths) / len(lengths) <= MOST_WORDS_OF_A_SENTENCE


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "index.md"], ids=name_of)
def test_a_page_has_no_foreign_phrases(page: Path) -> None:
    assert [phrase[0] for phrase in FOREIGN.finditer(prose_of(page.read_text()))] == []


def test_no_section_grows_beyond_its_budget() -> None:
    counts = dict.fromkeys(MOST_WORDS, 0)
    for page in PAGES:
        number = words(page.read_text())
        counts[""] += number
        if (section := name_of(page).partition("/")[0]) in counts:
            counts[section] += number
    assert {section: count for section, count in counts.items() if count > MOST_WORDS[section]} == {}
    assert len(PAGES) <= MOST_PAGES


def test_readme_can_be_read_in_a_minute_or_three() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= MOST_LINES_OF_README
    assert words(re.sub(r"\]\([^)]*\)", "", text)) <= MOST_WORDS_OF_README


def test_a_long_page_and_a_long_sentence_are_noticed() -> None:
    assert words("| a | b |\n|---|---|\n| c | `d e` |") == 5
    assert FOREIGN.search(prose_of("The job goes on."))
    assert not FOREIGN.search(prose_of("Run `hvlaunch goes on` now."))
    assert sentences("One two three. Four five: Six\n\n- seven `eight nine` [ten](x.md)\n\n| a | b |") == [
        3,
        2,
        1,
        3,
    ]


def test_the_words_of_the_glossary_are_linked_at_their_first_use(site: Path) -> None:
    glossary = re.findall(r'<a id="([\w-]+)"></a>', (DOCS / "reference/glossary.md").read_text())
    assert len(glossary) >= 15
    page = (site / "guides/failures/index.html").read_text()
    main = page.partition("<article")[2]
    links = re.findall(r'href="[^"]*reference/glossary/#([\w-]+)"', main)
    assert {"rank", "host", "worker"} <= set(links) <= set(glossary)
    assert len(links) == len(set(links))
    assert 'glossary/#rank">rank</a>, on which' not in main, "not at its first use"
