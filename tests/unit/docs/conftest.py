"""The site of docs/, built once, and served as readers see it."""

import fcntl
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

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
    """Serves text compressed, as GitHub Pages does."""

    def send_head(self) -> Any:
        path = Path(super().translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        kind = self.guess_type(str(path))
        is_named = self.path.endswith(("/", path.name))
        if not path.is_file() or not is_named or not re.search("text|javascript|json|svg|xml", kind):
            return super().send_head()
        data = gzip.compress(path.read_bytes())
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        return BytesIO(data)

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
