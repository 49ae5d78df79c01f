"""The site that `make docs` builds: without a warning, without a broken link, and in a browser."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import Browser, needs_chromium
from tests.cluster.testhosts import wait_until
from tests.unit.docs.blocks import ROOT

LIMIT = 100.0
pytestmark = pytest.mark.timeout(600)
LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src", "source": "src"}
LEAD_ELSEWHERE = {"a", "link canonical"}
"""What may lead to other sites: readers follow it, or nobody does. All else is loaded with the page."""
ANCHORS = ("id", "name")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is; built once for all processes that run tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "site"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            words = [
                sys.executable,
                "-m",
                "mkdocs",
                "build",
                "--strict",
                "--quiet",
                "--site-dir",
                f"{path}.made",
            ]
            built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
            Path(f"{path}.made").rename(path)
    return path


class Page(HTMLParser):
    """The links of one page, with what has them, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] or "" for name in ANCHORS if name in values}
        if (link := values.get(LINKS.get(tag, ""))) is not None:
            self.links.append((f"link {values['rel']}" if tag == "link" else tag, link))


@cache
def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def wrong_links(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.html")):
        where = path.relative_to(site)
        for who, link in page_of(path).links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if who not in LEAD_ELSEWHERE:
                    yield f"{where}: {who} loads {link}"
                continue
            if parts.scheme or where.name == "404.html":  # mailto; a page for any address
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where}: {link}: there is no such page"
            elif target.suffix == ".html" and unquote(parts.fragment) not in page_of(target).anchors:
                yield f"{where}: {link}: there is no such anchor"


def test_no_link_is_broken_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert list(wrong_links(site)) == []
    pages = [path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")]
    assert {"options", "troubleshooting", "api/hvlaunch", "api/hvlaunch.torch", "changelog"} <= set(pages)


def test_each_public_name_is_in_the_reference(site: Path) -> None:
    import hvlaunch

    anchors = page_of(site / "api/hvlaunch/index.html").anchors
    assert {f"hvlaunch.{name}" for name in hvlaunch.__all__ if name != "__version__"} <= anchors


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        pass


@pytest.fixture
def address(site: Path, tmp_path: Path) -> Iterator[str]:
    """Of the newest of its versions, in folders as mike has them."""
    (tmp_path / "latest").symlink_to(site)
    names = ("latest", "0.1")
    versions = json.dumps([{"version": name, "title": name, "aliases": []} for name in names])
    (tmp_path / "versions.json").write_text(versions)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/latest/"
        server.shutdown()
        thread.join()


COLOR = "return document.body.getAttribute('data-md-color-scheme')"
SEARCHED = """\
const input = document.querySelector("input.md-search__input");
input.focus();
input.value = arguments[0];
input.dispatchEvent(new Event("keyup", {bubbles: true}));
"""


@needs_chromium
def test_in_a_browser(address: str, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        browser.web.get(address)
        browser.shows("h1", "hvlaunch")
        browser.shows(".md-version", "latest")
        browser.web.execute_script(SEARCHED, "host-discovery-script")
        browser.shows(".md-search-result__list", "--host-discovery-script")
        colors = set()
        for _ in range(3):
            colors.add(browser.web.execute_script(COLOR))
            browser.web.execute_script(
                "document.querySelector('form[data-md-component=palette] label:not([hidden])').click()"
            )
        assert colors == {"default", "slate"}
        for page in ("options/#-np", "api/hvlaunch/#hvlaunch.run", "troubleshooting/"):
            browser.web.get(f"{address}{page}")
            wait_until(lambda: browser.text("h1") or None, f"the page {page}", LIMIT)
        own = ("about:", "chrome:", "data:", "blob:", address.removesuffix("latest/"))
        assert [one for one in browser.requests() if not one.startswith(own)] == []
        assert [entry for entry in browser.web.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.web.quit()
