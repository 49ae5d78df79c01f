"""The site that `make docs` builds: without a warning, without a broken link, and in a browser."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
import pytest

from docs.make_figures import RECORD, THEMES, charts, svg
from docs.site_pages import PAGES, REFERENCE, REPOSITORY, whole_path
from tests.browser import Browser, needs_chromium
from tests.testhosts.hosts import wait_until
from tests.unit.docs.blocks import ROOT
from tests.unit.docs.conftest import ADDRESS, search

LIMIT = 100.0
# A tracer would follow a parser of HTML through each page, and hvlaunch itself does not run here.
pytestmark = [pytest.mark.timeout(600), pytest.mark.no_cover]
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src", "source": "src"}
LEAD_ELSEWHERE = {"a", "link canonical"}
"""What may lead to other sites: readers follow it, or nobody does. All else is loaded with the page."""
ANCHORS = ("id", "name")
ENDLESS = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
"""What HTML does not end."""
HEADING = re.compile("h[1-6]")
IN_LINES = {"a", "b", "code", "em", "i", "kbd", "span", "strong"}
"""What begins no line of text."""


@dataclass
class Heading:
    level: int
    text: str = ""
    is_open: bool = True
    is_empty: bool = True
    """Nothing stands between it and the next heading."""


class Page(HTMLParser):
    """What a page has: links with what has them, anchors, headings, text without code, and elements that do not end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = {""}
        self.headings: list[Heading] = []
        self.text = ""
        self.open: Counter[str] = Counter()
        self.feed(text)

    def handle_data(self, data: str) -> None:
        if self.headings and self.headings[-1].is_open:
            self.headings[-1].text += data
        elif self.headings:
            self.headings[-1].is_empty &= not data.strip()
        self.text += "CODE" if self.open["code"] else data

    def handle_endtag(self, tag: str) -> None:
        self.open[tag] -= 1
        if HEADING.fullmatch(tag):
            self.headings[-1].is_open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.open[tag] += tag not in ENDLESS
        if HEADING.fullmatch(tag):
            self.headings.append(Heading(int(tag[1])))
        elif tag == "img" and self.headings:
            self.headings[-1].is_empty = False
        self.text += "" if tag in IN_LINES else "\n"
        self.anchors |= {values[name] or "" for name in ANCHORS if name in values}
        if (link := values.get(LINKS.get(tag, ""))) is not None:
            self.links.append((f"link {values['rel']}" if tag == "link" else tag, link))


@cache
def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def wrong_links(site: Path) -> Iterator[str]:
    files = {str(path) for path in site.rglob("*") if path.is_file()}
    for path in sorted(site.rglob("*.html")):
        where = path.relative_to(site)
        for who, link in page_of(path).links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if who not in LEAD_ELSEWHERE:
                    yield f"{where}: {who} loads {link}"
                file = re.sub(f"^{REPOSITORY}/(blob|tree)/HEAD/", "", link)
                if file in PAGES or f"{file}/README.md" in PAGES:
                    yield f"{where}: {link} leads away from a page that is here"
                continue
            if parts.scheme:  # mailto
                continue
            if where.name == "404.html":  # a page for any address
                if not parts.path.startswith(urlsplit(ADDRESS).path):
                    yield f"{where}: {link}: not below the site's address"
                    continue
                address = site / unquote(parts.path).removeprefix(urlsplit(ADDRESS).path)
            else:
                address = path.parent / unquote(parts.path) if parts.path else path
            # To ask the file system for each of some ten thousand links takes seconds.
            target = os.path.normpath(address)
            target = f"{target}/index.html" if f"{target}/index.html" in files else target
            if target not in files:
                yield f"{where}: {link}: there is no such page"
            elif target.endswith(".html") and unquote(parts.fragment) not in page_of(Path(target)).anchors:
                yield f"{where}: {link}: there is no such anchor"


def test_no_link_is_broken_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(wrong_links(site)) == []
    pages = [path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")]
    assert {
        "reference/options",
        "reference/errors",
        "api/hvlaunch",
        "api/hvlaunch.torch",
        "changelog",
    } <= set(pages)


def test_the_site_map_has_every_page(site: Path) -> None:
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    addresses = {f"{ADDRESS}{page}/" for page in pages - {"."}} | {ADDRESS}
    assert set(re.findall(r"<loc>(.*?)</loc>", (site / "sitemap.xml").read_text())) == addresses


def test_what_a_page_means_as_a_table_is_one_and_a_word_is_no_element(site: Path) -> None:
    wrong = []
    for path in sorted(site.rglob("*.html")):
        page = page_of(path)
        rows = [line for line in page.text.splitlines() if line.lstrip().startswith("|")]
        wrong += [f"{path.relative_to(site)}: no row of a table: {row}" for row in rows]
        wrong += [f"{path.relative_to(site)}: <{tag}> has no end" for tag in +page.open]
    assert wrong == []


def test_each_section_has_something_and_its_level(site: Path) -> None:
    wrong = []
    for path in sorted(site.rglob("index.html")):
        headings = page_of(path).headings
        where = path.relative_to(site)
        if [heading.level for heading in headings].count(1) != 1 or headings[0].level != 1:
            wrong.append(f"{where}: not one title, which comes first")
        for heading, following in pairwise(headings):
            if heading.is_empty and following.level <= heading.level:
                wrong.append(f"{where}: nothing below {heading.text}")
            if following.level > heading.level + 1:
                wrong.append(f"{where}: {following.text} is too far below {heading.text}")
    assert wrong == []


@dataclass(frozen=True)
class Name:
    """What may be imported, or is a member of it."""

    path: str
    """Where it is defined."""
    anchors: frozenset[str]
    """By which the reference may have it."""
    has_docstring: bool


@cache
def hvlaunch_as_written() -> Any:
    return griffe.load("hvlaunch", search_paths=[str(ROOT)], allow_inspection=False)


def public_names(module: str) -> Iterator[Name]:
    """What a package offers of hvlaunch's own, and the public members of its classes. What a class has from a public one is that one's."""
    whole = hvlaunch_as_written()
    offers: dict[str, set[str]] = {}
    for package in REFERENCE:
        part = whole[package.partition(".")[2]] if "." in package else whole
        for name in map(str, part.exports or ()):
            path = whole_path(part.members[name])
            if name != "__version__" and path.startswith("hvlaunch."):
                offers.setdefault(path, set()).add(f"{package}.{name}")
    for path, names in offers.items():
        if not any(name.rpartition(".")[0] == module for name in names):
            continue
        found = whole[path.partition(".")[2]]
        yield Name(path, frozenset(names), found.has_docstring)
        for name, member in found.all_members.items() if found.is_class else ():
            owner = whole_path(member).rpartition(".")[0]
            if not name.startswith("_") and (owner == path or owner not in offers):
                anchors = frozenset(f"{one}.{name}" for one in names)
                yield Name(f"{path}.{name}", anchors, member.has_docstring)


@pytest.mark.parametrize("module", REFERENCE)
def test_each_public_name_is_in_the_reference(site: Path, module: str) -> None:
    anchors = set().union(*(page_of(path).anchors for path in (site / "api").rglob("*.html")))
    names = list(public_names(module))
    assert names
    wrong = [name.path for name in names if not (name.has_docstring and name.anchors & anchors)]
    assert wrong == [], "no docstring, or not on the page"


COLOR = "return document.body.getAttribute('data-md-color-scheme')"


@needs_chromium
def test_in_a_browser(address: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.web.get(address)
        browser.shows("h1", "every machine that you can ssh into")
        browser.shows(".md-version", "latest")
        search(browser, "host-discovery-script")
        browser.shows(".md-search-result__list", "--host-discovery-script")
        colors = set()
        for _ in range(3):
            colors.add(browser.web.execute_script(COLOR))
            browser.web.execute_script(
                "document.querySelector('form[data-md-component=palette] label:not([hidden])').click()"
            )
        assert colors == {"default", "slate"}
        for page in ("reference/options/#-np", "api/hvlaunch/#hvlaunch.run", "guides/troubleshooting/"):
            browser.web.get(f"{address}{page}")
            wait_until(lambda: browser.text("h1") or None, f"the page {page}", LIMIT)
        own = ("about:", "chrome:", "data:", "blob:", address.removesuffix("latest/"))
        assert [one for one in browser.requests() if not one.startswith(own)] == []
        assert [entry for entry in browser.web.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.web.quit()


LANDING_BYTES = 300_000


@needs_chromium
def test_the_landing_page_is_light_legible_and_asks_no_other_site(address: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        faults = {}
        for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            browser.show_as(width=width, scheme=scheme)
            browser.web.get(address)
            browser.shows("h1", "every machine")
            browser.show_as(width=width, scheme=scheme)
            faults[width, scheme] = browser.layout_faults()
            if width == 1280 and scheme == "light":
                time.sleep(1)  # what it loads later counts too
                assert 50_000 < browser.transferred() < LANDING_BYTES
        assert faults == {look: [] for look in faults}
        own = ("about:", "chrome:", "data:", "blob:", address.removesuffix("latest/"))
        assert [url for url in browser.requests() if not url.startswith(own)] == []
        assert {f"{address}pictures/kill.svg", f"{address}pictures/figures-dark.svg"} <= browser.asked
    finally:
        browser.web.quit()


CHOSEN = """\
const links = [...document.querySelectorAll(".md-version__link")];
links.find(link => link.textContent.includes(arguments[0])).click();
"""


def test_the_figures_match_the_records() -> None:
    record = RECORD.read_text(encoding="utf-8")
    for theme in THEMES:
        picture = ROOT / "docs" / "pictures" / f"figures-{theme}.svg"
        assert picture.read_text(encoding="utf-8") == svg(record, theme), "python docs/make_figures.py"


def test_a_figure_that_the_benchmarks_lack_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks"):
        charts("| 8 | 0.30 | 0.37 | 0.57 |")


@needs_chromium
def test_another_version_of_a_page_is_that_page(address: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.web.get(f"{address}guides/lost-host/#know-the-limits")
        browser.shows(".md-version", "latest")
        browser.web.execute_script(CHOSEN, "0.1")
        other = address.replace("/latest/", "/0.1/")
        wait_until(lambda: browser.web.current_url.startswith(other), "the other version", LIMIT)
        assert browser.web.current_url == f"{other}guides/lost-host/#know-the-limits"
    finally:
        browser.web.quit()


def test_no_file_of_python_is_published(site: Path) -> None:
    assert not [
        path for path in site.rglob("*") if path.name == "__pycache__" or path.suffix in (".py", ".pyc")
    ]
