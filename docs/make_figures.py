"""Makes the picture of measured figures from the records in docs/internals/records/benchmarks.md, in light and dark: make pictures.

The tables are the record: a test compares the picture with them.
"""

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "internals" / "records" / "benchmarks.md"
PICTURES = ROOT / "docs" / "pictures"

__all__ = ["RECORD", "THEMES", "charts", "svg"]

WIDTH, BAR, LEFT = 520, 26, 168  # pixels; the bars begin at LEFT
THEMES = {
    "light": {"text": "#1b2430", "dim": "#5b6675", "mine": "#3949ab", "theirs": "#b6bdc9"},
    "dark": {"text": "#e3e8ee", "dim": "#a9b4c2", "mine": "#8c9eff", "theirs": "#5a6472"},
}


class Chart(NamedTuple):
    """A question, and each program's answer in seconds."""

    title: str
    bars: tuple[tuple[str, float], ...]


def charts(record: str) -> list[Chart]:
    """Return what the tables of the record say; the first bar is hvlaunch's. Raises ValueError if a row is missing."""
    start = _row(record, "8", r"\| hosts \| hvlaunch s \|")
    (local,) = re.findall(r"On localhost: hvlaunch ([\d.]+) s .*?`torchrun --standalone` ([\d.]+) s", record)
    killed = r"A worker is killed by `kill -9`"
    c10d = _row(record, "torchrun c10d, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", killed)
    return [
        Chart("A job of 8 hosts starts and ends", (("hvlaunch", start[0]), ("mpirun", start[2]))),
        Chart(
            "A job on this machine starts and ends",
            (("hvlaunch", float(local[0])), ("torchrun", float(local[1]))),
        ),
        Chart(
            "Training stands still after a kill -9",
            (
                ("hvlaunch, elastic", _row(record, "in the process, with one worker less", killed)[0]),
                (
                    "hvlaunch, any script",
                    _row(record, "unmodified script, all workers started again", killed)[0],
                ),
                ("torchrun", c10d[0]),
            ),
        ),
    ]


def _row(record: str, name: str, before: str) -> list[float]:
    """Return the first number of each cell of the row with that name, in the first table that follows `before`."""
    if (place := re.search(before, record)) is None:
        raise ValueError(f"benchmarks.md lacks {before}")
    row = re.search(rf"^\| {re.escape(name)} \|(.*)$", record[place.end() :], re.MULTILINE)
    if row is None:
        raise ValueError(f"benchmarks.md lacks the row {name}")
    return [
        float(number.group()) for cell in row.group(1).split("|") if (number := re.search(r"[\d.]+", cell))
    ]


def svg(record: str, theme: str) -> str:
    """Return the charts as one picture."""
    ink = THEMES[theme]
    lines: list[str] = []
    y = 0
    for chart in charts(record):
        y += 30
        lines.append(f'<text x="0" y="{y}" class="title" fill="{ink["text"]}">{escape(chart.title)}</text>')
        y += 10
        lines += _bars(chart, y, ink)
        y += len(chart.bars) * (BAR + 6) + 10
    label = "; ".join(
        f"{chart.title}: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in chart.bars)}"
        for chart in charts(record)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title><style>text{{font:15px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}}"
        f".title{{font-weight:700}}</style>{''.join(lines)}</svg>\n"
    )


def _bars(chart: Chart, y: int, ink: dict[str, str]) -> Iterator[str]:
    longest = max(seconds for _, seconds in chart.bars)
    for number, (name, seconds) in enumerate(chart.bars):
        top = y + number * (BAR + 6)
        width = max(3, round(seconds / longest * (WIDTH - LEFT - 70)))
        kind = "mine" if name.startswith("hvlaunch") else "theirs"
        yield f'<text x="{LEFT - 10}" y="{top + 18}" text-anchor="end" fill="{ink["dim"]}">{escape(name)}</text>'
        yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR}" rx="3" fill="{ink[kind]}"/>'
        yield f'<text x="{LEFT + width + 8}" y="{top + 18}" fill="{ink["text"]}">{seconds:.2f} s</text>'


def main(pictures: Path) -> None:
    """Write a picture for each theme."""
    record = RECORD.read_text(encoding="utf-8")
    for theme in THEMES:
        (pictures / f"figures-{theme}.svg").write_text(svg(record, theme), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PICTURES)
