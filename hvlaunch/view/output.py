"""Output of ranks for people: last lines, search, and stacks. Pure."""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvlaunch.console.lines import visible
from hvlaunch.console.stored import Stored
from hvlaunch.telemetry.stack import from_json, summary, tree_lines

__all__ = ["Tails", "newest_lines_with", "shown_stacks"]

_LONGEST = 512
"""Bytes of a line that are kept."""
_MOST_LINES = 20
_INVISIBLE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class Tails:
    """Keeps the last lines of each rank; feed() adds output."""

    def __init__(self) -> None:
        self.printed: Counter[int] = Counter()
        """Bytes by rank."""
        self._lines: dict[int, deque[bytes]] = {}
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Add output. Only the last state of a progress bar counts."""
        self.printed[rank] += len(data)
        pending = self._unfinished.get((rank, stream), b"") + data
        # A terminal shows CR LF as one line end, but a CR alone overwrites the line.
        *whole, unfinished = pending.replace(b"\r\n", b"\n").split(b"\n")
        # Two states suffice: the last may be empty so far.
        self._unfinished[rank, stream] = b"\r".join(unfinished.split(b"\r")[-2:])[-_LONGEST:]
        lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
        # Older lines would drop out of the deque at once.
        lines.extend(state for line in whole[-_MOST_LINES:] if (state := _shown(line)))

    def lines(self, rank: int) -> list[str]:
        """Return the newest lines, at the end the unfinished line of each stream; of a progress bar the last state."""
        unfinished = [_shown(self._unfinished.get((rank, stream), b"")) for stream in ("stdout", "stderr")]
        return [_text(line) for line in (*self._lines.get(rank, ()), *unfinished) if line.strip()]

    def line(self, rank: int) -> str:
        """Return the last of lines()."""
        return next(reversed(self.lines(rank)), "")


def _shown(line: bytes) -> bytes:
    """Return the last state of a line that was overwritten, as a terminal shows it."""
    # A progress bar may clear its line at the end.
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1][:_LONGEST] if states else b""


def _text(line: bytes) -> str:
    """Decode a line without colours and control characters, which a terminal would obey."""
    text = line.decode(errors="replace")
    return visible(_INVISIBLE.sub("", text).replace("\t", " ").rstrip())


_STREAMS = ("stdout", "stderr")
_LONGEST_LINE = 4096
"""Bytes of a line; a longer line is split."""


def newest_lines_with(
    items: Iterable[Stored], text: str, ranks: Collection[int] | None, count: int
) -> list[Mapping[str, Any]]:
    """Return the last `count` lines of these ranks with `text` in them; case does not matter. None: all ranks, and hvlaunch.

    A line has `time` (seconds since 1970), `rank` (None for hvlaunch's messages), `stream` and `text`.
    """
    lines_found: deque[Mapping[str, Any]] = deque(maxlen=count)
    unfinished: dict[tuple[int | None, str], bytes] = {}
    pattern = text.casefold()

    def add(item: Stored, line: bytes) -> None:
        # A program may overwrite its line: a terminal shows the last state.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if pattern in shown.casefold():
            lines_found.append({"time": item.time, "rank": item.rank, "stream": item.kind, "text": shown})

    for item in items:
        if ranks is not None and item.rank not in ranks:
            continue
        key = item.rank, item.kind.removesuffix(" ended")
        if item.kind in _STREAMS:
            *lines, unfinished_line = (unfinished.pop(key, b"") + item.data).split(b"\n")
            # A worker may never end its line.
            if len(unfinished_line) > _LONGEST_LINE:
                lines, unfinished_line = [*lines, unfinished_line], b""
            if unfinished_line:
                unfinished[key] = unfinished_line
        elif item.kind in ("said", "shown"):
            lines = item.data.split(b"\n")
        else:
            lines = [unfinished.pop(key)] if key in unfinished else []
        for line in lines:
            add(item, line)
    # A line without its end yet may be what a reader looks for.
    for (rank, stream), line in unfinished.items():
        add(
            Stored(
                lines_found[-1]["time"] if lines_found else 0.0,
                "stderr" if stream == "stderr" else "stdout",
                rank=rank,
            ),
            line,
        )
    return list(lines_found)


def shown_stacks(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to POST /stacks as text: `summary` in a line, and `lines` with equal stacks merged, the rarest first."""
    stacks = from_json(answer)
    if not stacks:
        return {"summary": "no workers", "lines": []}
    return {"summary": visible(summary(stacks)), "lines": [visible(line) for line in tree_lines(stacks)]}
