"""The site of docs/, built once, and served as readers see it."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.browser import Browser
from tests.unit.docs.blocks import ROOT

__all__ = ["ADDRESS", "search"]

ADDRESS = "https://docs.example.org/hvlaunch/"
_TYPE = """\
const input = document.querySelector("input.md-search__input");
input.focus();
input.value = arguments[0];
input.dispatchEvent(new Event("keyup", {bubbles: true}));
"""


def search(browser: Browser, words: str) -> None:
    """Type words into the search of the page that the browser shows."""
    browser.web.execute_script(_TYPE, words)


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
            environ = {**os.environ, "SITE_URL": ADDRESS}
            built = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
            assert (built.returncode, built.stdout) == (0, ""), built.stdout + built.stderr
            Path(f"{path}.made").rename(path)
    return path


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        pass


@pytest.fixture
def address(site: Path, tmp_path: Path) -> Iterator[str]:
    """Of the newest of its versions, in folders as mike has them."""
    names = ("latest", "0.1")
    for name in names:
        (tmp_path / name).symlink_to(site)
    versions = json.dumps([{"version": name, "title": name, "aliases": []} for name in names])
    (tmp_path / "versions.json").write_text(versions)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/latest/"
        server.shutdown()
        thread.join()
