"""The page of waits is the one that the table of waits makes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_of_waits_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "docs/waits_page.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == (ROOT / "docs/internals/waits.md").read_text(), "make options-page"
