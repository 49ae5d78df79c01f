"""Whether the pictures in docs/ show what hvlaunch shows today: they are made again, and compared by their text."""

import html
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs.make_animation import LAST, LENGTH, WIDTH
from hvlaunch.engine.causes import MoreWorkers, WorkerEnded
from hvlaunch.engine.facts import Fact, RoundFormed, RoundStarting
from hvlaunch.job import JobResult
from hvlaunch.watch import ended_well
from hvlaunch.watch.sentences import sentence
from tests.browser import needs_chromium

DOCS = Path(__file__).parents[2] / "docs"
HAS_TMUX = shutil.which("tmux") is not None
pytestmark = pytest.mark.timeout(300)

_MARKED = re.compile(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>')
_VARIES = (
    (r"\b[0-9a-f]{12}\b", "JOB"),
    (r"[#─]+", "#"),
    (r"\d+(?:[.:]\d+)*[KMGB%]*", "0"),
    (r"\b0(?:[-,]0)+", "0"),
    (r"\b(?:working|waiting|silent|printing|sleeping)\b", "STATE"),
)
"""What is another thing each time: ids, bars, figures, times, what ranks do just now."""
_FIGURE = r"(\d+ min )?\d+(\.\d+)?"
_OUTPUT = re.compile(
    r"^\[?\d\]?.*step \d+|^[-\dx ]+$|^ranks? [-\d,]+(?:: no stack| in| by) |^(?:\d+ )?hosts? .+ lacks? the file "
    r"|^hvlaunch\w|^(the newest )?\d+ lines$"
    r"|^[-\d,]+ (?:hrtimer|futex|do|pipe|poll|ep|wait)_\w+$"
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


@needs_chromium
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


def test_the_animation_has_the_messages_of_today_and_is_short() -> None:
    hosts = ("gpu1", "gpu2", "gpu3", "gpu4")
    facts: tuple[Fact, ...] = (
        RoundStarting(0, 4, hosts, "10.77.1.1", 20000),
        RoundFormed(0, 4, hosts, None),
        RoundFormed(1, 3, hosts[:3], WorkerEnded(2, "gpu3", None, signal.SIGKILL, None)),
        RoundFormed(2, 4, hosts, MoreWorkers(1)),
    )
    messages = [
        f"hvlaunch: {text}"
        for text in (*map(sentence, facts), ended_well(JobResult(0, 45.1), has_lost=False))
    ]
    picture = (DOCS / "pictures" / "kill.svg").read_text()
    texts = [
        html.unescape(re.sub("<.*?>", "", row))
        for row in re.findall(r'<text class="\w+" y="\d+">(.*?)</text>', picture)
    ]
    rows = {re.sub(_FIGURE, "0", " ".join(text.split())) for text in texts}
    # The terminal breaks a long line at its last column.
    parts = [
        [" ".join(line[at : at + WIDTH].split()) for at in range(0, len(line), WIDTH)] for line in messages
    ]
    printed = [[re.sub(_FIGURE, "0", part) for part in line] for line in parts]
    assert {part for line in printed for part in line} <= rows
    assert {row for row in rows if row.startswith("hvlaunch:")} == {line[0] for line in printed}
    seconds = {float(length) for length in re.findall(r"animation:\w+ ([\d.]+)s", picture)}
    assert max(seconds) <= LENGTH + LAST
    assert "long waits cut short" in picture, "the reader is told"
