"""Makes README's moving picture from a real job on four test hosts: make pictures (root, tmux, torch).

A worker is killed with -9 while four train, and the training goes on. Rows of the terminal are recorded as they change; CSS
alone plays them, since GitHub shows an SVG as an image, where no script runs. Long waits are cut short, and a long job is shown
faster: the picture says so, and its clock shows the real seconds. A reader who asks for less motion sees the last screen.
"""

import itertools
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.make_pictures import PICTURES, SESSION, Terminal, tmux  # noqa: E402
from tests.testhosts.hosts import TestHosts  # noqa: E402

TICK = 0.2  # seconds between two looks at the terminal
WAIT = 1.0  # seconds that the picture takes for a longer wait
LAST = 4.0  # seconds for which the last screen stays
ROW, COLUMN, SIZE = 19, 8.43, 14  # pixels of a row and of a column, and of the letters
WIDTH, HEIGHT = 64, 17  # of the terminal: its letters are legible on a telephone
LENGTH = 16.0  # seconds for which the picture moves, at most; a longer job is shown faster
COMMAND = "hvlaunch -np 4 --min-np 2 -H 'gpu[1-4]' python train.py"
KILL = "ssh gpu3 pkill -9 -f train.py"
TRAIN = """\
import sys
import time

import torch
from ddp_digits import Net, digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvlaunch.torch as hvt
from hvlaunch.torch import elastic

STEPS = 40


@elastic.run
def train(state):
    model = DistributedDataParallel(state.model)
    images, labels = (torch.stack(column) if column[0].dim() else torch.tensor(column) for column in zip(*digits()[0]))
    mine = slice(hvt.rank(), None, hvt.size())
    while state.step < STEPS:
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
        bar = "#" * (state.step * 20 // STEPS)
        print(f"\\rstep {state.step:2}/{STEPS} [{bar:<20}] loss {loss.item():.3f}", end="", file=sys.stderr, flush=True)
        time.sleep(0.1)


torch.manual_seed(0)
net = Net()
train(elastic.TorchState(model=net, optimizer=torch.optim.Adam(net.parameters(), lr=2e-3), step=0))
"""


class Screen(NamedTuple):
    """The rows of a terminal, with their colours as escape sequences, and since when they stood there."""

    second: float
    rows: tuple[str, ...]


def panes() -> tuple[str, ...]:
    """The rows of the upper pane and of the lower one."""
    return tuple(
        row
        for pane in ("0", "1")
        for row in tmux("capture-pane", "-p", "-e", "-t", f"{SESSION}.{pane}").removesuffix("\n").split("\n")
    )


def record(seconds: float) -> Iterator[Screen]:
    """Look at the terminal every TICK seconds, for at most `seconds`."""
    start = time.monotonic()
    for tick in range(int(seconds / TICK)):
        time.sleep(max(0.0, start + tick * TICK - time.monotonic()))
        yield Screen(tick * TICK, panes())


def without_waits(screens: Iterable[Screen]) -> Iterator[Screen]:
    """The screens that differ from the one before, at most WAIT seconds apart, each with the real time as its last row.

    Workers import torch for longer than people watch.
    """
    clock = 0.0
    before: Screen | None = None
    for screen in screens:
        if before is None or screen.rows != before.rows:
            clock += min(WAIT, screen.second - before.second) if before else 0.0
            before = screen
            yield Screen(clock, (*screen.rows, f"{screen.second:.0f} s"))


def cells(row: str) -> str:
    """The row as spans of SVG, each at its column; nothing if the row is blank."""
    console = Console(width=200, force_terminal=True, color_system="truecolor", legacy_windows=False)
    spans, column = [], 0
    for segment in console.render(Text.from_ansi(row), console.options.update(no_wrap=True)):
        text = segment.text.rstrip("\n")
        if text.strip():
            style = segment.style
            color = style.color.get_truecolor(SVG_EXPORT_THEME).hex if style and style.color else ""
            fill = (
                f' fill="{color}"' if color and style and style.color and not style.color.is_default else ""
            )
            bold = ' font-weight="bold"' if style and style.bold else ""
            spans.append(f'<tspan x="{column * COLUMN:.1f}"{fill}{bold}>{escape(text)}</tspan>')
        column += len(text)
    return "".join(spans)


def intervals(screens: list[Screen], row: int, end: float) -> Iterator[tuple[float, float, str]]:
    """Yield each text of the row, with the seconds at which it begins and ends."""
    changes = [next(group) for _, group in itertools.groupby(screens, key=lambda screen: screen.rows[row])]
    for screen, after in itertools.zip_longest(changes, changes[1:]):
        yield screen.second, after.second if after else end, screen.rows[row]


def svg(screens: Iterable[Screen], title: str) -> str:
    """The recording as an animation that repeats."""
    screens = list(without_waits(screens))
    speed = max(1, math.ceil(screens[-1].second / LENGTH))
    screens = [Screen(second / speed, rows) for second, rows in screens]
    note = f"{f'{speed} times as fast' if speed > 1 else 'real time'}, long waits cut short"
    height = len(screens[0].rows)
    end = screens[-1].second + LAST
    texts: list[str] = []
    classes: dict[tuple[float, float], str] = {}
    for row in range(height):
        for start, stop, ansi in intervals(screens, row, end):
            if content := cells(ansi):
                name = classes.setdefault((start, stop), f"t{len(classes)}")
                # The clock stands in the title bar.
                place = (
                    f'y="{(row + 1) * ROW}"'
                    if row < height - 1
                    else f'transform="translate({(WIDTH - 5) * COLUMN:.0f} -15)"'
                )
                texts.append(f'<text class="{name}" {place}>{content}</text>')
    rules = []
    # Without motion, the last screen stands.
    still: dict[bool, list[str]] = {False: [], True: []}
    for (start, stop), name in classes.items():
        if (start, stop) == (0, end):
            continue
        shown = f"{100 * start / end:.2f}%{{opacity:1}}"
        hidden = "" if stop == end else f"{100 * stop / end:.2f}%{{opacity:0}}"
        first = "" if start == 0 else "0%{opacity:0}"
        rules.append(
            f"@keyframes {name}{{{first}{shown}{hidden}}}.{name}{{animation:{name} {end:.1f}s steps(1) infinite}}"
        )
        still[stop == end].append(f".{name}")
    motionless = "".join(
        f"{','.join(names)}{{animation:none;opacity:{int(is_last)}}}"
        for is_last, names in still.items()
        if names
    )
    rules.append(f"@media(prefers-reduced-motion){{{motionless}}}")
    wide, tall = WIDTH * COLUMN + 40, (height - 1) * ROW + 60
    dots = "".join(
        f'<circle cx="{22 + 20 * place}" cy="20" r="6" fill="{color}"/>'
        for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {tall}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><style>text{{font:{SIZE}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        f"fill:#c5c8c6;white-space:pre}}{''.join(rules)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#1d1f21" stroke="#4a4f55"/>{dots}'
        f'<text x="{(WIDTH - 6) * COLUMN:.0f}" y="25" text-anchor="end" style="fill:#8b9095;font-size:12px">{note}</text>'
        f'<g transform="translate(20 40)">{"".join(texts)}</g></svg>\n'
    )


def main(pictures: Path) -> None:
    """Record a job, and the kill of one of its workers."""
    folder = Path("/tmp/demo")  # noqa: S108 (it stands in the picture)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "ddp_digits.py", folder)
    (folder / "train.py").write_text(TRAIN)
    with TestHosts(["gpu1", "gpu2", "gpu3", "gpu4"], share=[str(folder)]) as hosts:
        terminal = Terminal(hosts, str(folder), WIDTH, HEIGHT)
        try:
            terminal.split(lines=3)
            terminal.type(
                "export TORCH_CPP_LOG_LEVEL=ERROR"
            )  # the names of test hosts are in no DNS, and torch warns
            terminal.type(COMMAND)
            screens: list[Screen] = []
            killed = False
            for screen in record(120):
                screens.append(screen)
                text = "\n".join(screen.rows)
                if "step 10" in text and not killed:
                    tmux("send-keys", "-t", f"{SESSION}.1", KILL, "Enter")
                    killed = True
                if "done after" in text:
                    break
            if "done after" not in text:
                sys.exit(f"the job has not ended:\n{text}")
        finally:
            tmux("kill-session", "-t", SESSION)
    (pictures / "kill.svg").write_text(
        svg(screens, "Four hosts train, a worker is killed, the training goes on")
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else PICTURES)
