"""Running programs in turns, and what they took: wall time, CPU of the program and all its children, peak memory."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Contender", "Failed", "Sample", "heading", "in_turns", "mebibytes", "run", "spread", "table"]

_QUOTED = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Seconds; `cpu` is user + system of the program and the children it waited for; bytes."""

    wall: float
    cpu: float
    memory: int


class Failed(Exception):
    """A program did not end with 0; the text has its stderr."""


@dataclass(slots=True)
class Contender:
    """A program that takes part: `run` runs it once, and gives a Sample or numbers of its own.

    `absent` says why it can't, and how it could.
    """

    name: str
    run: Callable[[], Any] | None = None
    absent: str = ""
    samples: list[Any] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Of the samples' field `what`."""
        return float(statistics.median(getattr(sample, what) for sample in self.samples))


def run(popen: Callable[..., subprocess.Popen[Any]], argv: Sequence[str], **options: Any) -> Sample:
    """Run `argv` to its end by popen(argv, **options). Raises Failed."""
    with tempfile.TemporaryFile() as said:
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said, **options}
        started = time.monotonic()
        process = popen(argv, **settings)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if process.returncode != 0:
        raise Failed(f"{' '.join(argv)} ended with {process.returncode}: {text[-_QUOTED:]}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def in_turns(contenders: Iterable[Contender], runs: int) -> None:
    """Run A B C A B C …, so that what else the machine does meets all alike; a first turn warms up and is dropped."""
    for turn in range(runs + 1):
        for contender in contenders:
            if contender.run is not None:
                wait_quiet()
                sample = contender.run()
                if turn:
                    contender.samples.append(sample)


def wait_quiet() -> None:
    """Wait until the processors are idle, for 5 s at most: what ended before may still have processes that end on the hosts."""
    deadline = time.monotonic() + 5.0
    busy, total = _ticks()
    while time.monotonic() < deadline:
        time.sleep(0.2)  # the time that is looked at
        before, (busy, total) = (busy, total), _ticks()
        if busy - before[0] <= 0.05 * (total - before[1]):
            return


def _ticks() -> tuple[int, int]:
    """Return the busy ticks of all processors since the boot, and all ticks; the same twice where there is no /proc."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the least and the most in brackets."""
    least, middle, most = (
        f"{one:.{digits}f}" for one in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({least}-{most})"


def mebibytes(size: float) -> str:
    return f"{size / (1 << 20):.0f}"


def heading(title: str) -> str:
    """What was measured, and what else the machine did."""
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    version = sys.version.partition(" ")[0]
    return f"\n{title}\n{os.cpu_count()} processors, load {load}, Python {version}\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, in Markdown."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (word.ljust(width) for word, width in zip(row, widths, strict=True))
        return "| " + " | ".join(cells) + " |"

    return "\n".join(_lines(line, head, rows, widths))


def _lines(
    line: Callable[[Sequence[str]], str],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
) -> Iterator[str]:
    yield line(head)
    yield line(["-" * width for width in widths])
    yield from map(line, rows)
