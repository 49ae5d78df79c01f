"""Whether the pictures in docs/ show what hvlaunch shows today: they are made again, and compared by their text."""

import html
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_chromium

DOCS = Path(__file__).parents[2] / "docs"
HAS_TMUX = shutil.which("tmux") is not None
pytestmark = [pytest.mark.timeout(300), needs_chromium]

_MARKED = re.compile(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')
_VARIES = (
    (r"\b[0-9a-f]{12}\b", "JOB"),
    (r"[#─]+", "#"),
    (r"\d+(?:[.:]\d+)*[KMGB%]*", "0"),
    (r"\b(?:working|waiting|silent|printing|sleeping)\b", "STATE"),
)
"""What is another thing each time: ids, bars, figures, times, what ranks do just now."""
_OUTPUT = re.compile(
    r"^\[?\d\]?.*step \d+|^[-\dx ]+$|^ranks? [-\d,]+ (?:in|by) |^hosts? \S+ lacks? the file "
)


def text_of(picture: Path) -> str:
    """The rows of a picture of a terminal; the text of a page."""
    if picture.suffix == ".txt":
        return picture.read_text()
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, marked in _MARKED.findall(picture.read_text()):
        rows.setdefault(float(y), []).append((float(x), html.unescape(re.sub("<.*?>", "", marked))))
    return "\n".join(" ".join(text for _, text in sorted(row)) for _, row in sorted(rows.items()))


def shape(picture: Path) -> list[str]:
    """Its lines without what ranks print, and without what varies, in any order: two streams have no order among them.

    Without what hosts are asked as the job ends: who is late, on a busy machine, says it no more. Of stacks the kernel's are shown then.
    """
    rows = {" ".join(line.split()) for line in text_of(picture).splitlines()}  # spaces of all kinds
    lines = {row for row in rows if not _OUTPUT.match(row)}
    for pattern, word in _VARIES:
        lines = {re.sub(pattern, word, line) for line in lines}
    return sorted(lines)


@pytest.mark.skipif(not HAS_TMUX, reason="there is no tmux")
@pytest.mark.parametrize(
    ("script", "words", "names"),
    [
        ("make_pictures.py", (), ("connecting.svg", "failure.svg", "running.svg", "report.txt")),
        pytest.param("make_view_pictures.py", ("12",), ("page.txt", "top.svg"), marks=pytest.mark.long),
    ],
)
def test_pictures_show_the_current_view(
    script: str, words: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    made = [sys.executable, str(DOCS / script), str(tmp_path), *words]
    subprocess.run(made, check=True, timeout=240)
    for name in names:
        assert shape(tmp_path / name) == shape(DOCS / "pictures" / name), f"{name}: make pictures"
