"""The last line of each rank, and how much it has printed. Pure."""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvlaunch.console.lines import visible
from hvlaunch.console.stored import Stored
from hvlaunch.telemetry.stack import from_json, summary, tree_lines

__all__ = ["Tails", "newest_lines_with", "shown_stacks"]

_LONGEST = 512
"""Bytes that are kept of a line."""
_MOST_LINES = 20
_INVISIBLE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class Tails:
    """Fed with what ranks print, stdout and stderr as it comes."""

    def __init__(self) -> None:
        self.printed: Counter[int] = Counter()
        """Bytes of each rank."""
        self._lines: dict[int, deque[bytes]] = {}
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """More output. Of a progress bar the last state counts."""
        self.printed[rank] += len(data)
        rest = self._unfinished.get((rank, stream), b"") + data
        *whole, unfinished = rest.replace(b"\r\n", b"\n").split(b"\n")
        self._unfinished[rank, stream] = b"\r".join(unfinished.split(b"\r")[-2:])[-_LONGEST:]
        lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
        lines.extend(state for line in whole[-_MOST_LINES:] if (state := _shown(line)))

    def lines(self, rank: int) -> list[str]:
        """The newest, the unfinished one of each stream last; of a progress bar, its last state."""
        unfinished = [_shown(self._unfinished.get((rank, stream), b"")) for stream in ("stdout", "stderr")]
        return [_text(line) for line in (*self._lines.get(rank, ()), *unfinished) if line.strip()]

    def line(self, rank: int) -> str:
        """The last of lines()."""
        return next(reversed(self.lines(rank)), "")


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line that may have been drawn again and again."""
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1][:_LONGEST] if states else b""


def _text(line: bytes) -> str:
    """Without colours, and with nothing in it that a terminal would obey."""
    text = line.decode(errors="replace")
    return visible(_INVISIBLE.sub("", text).replace("\t", " ").rstrip())


_STREAMS = ("stdout", "stderr")
_LONGEST_LINE = 4096
"""Bytes of a line; the rest of it begins another."""


def newest_lines_with(
    items: Iterable[Stored], text: str, ranks: Collection[int] | None, count: int
) -> list[Mapping[str, Any]]:
    """The last `count` lines of these ranks (None: all, and hvlaunch's own) with `text` in them, in small or large letters.

    Each has `time` (seconds since 1970), `rank` (None: hvlaunch's own), `stream` and `text`.
    """
    found: deque[Mapping[str, Any]] = deque(maxlen=count)
    unfinished: dict[tuple[int | None, str], bytes] = {}
    wanted = text.casefold()

    def add(item: Stored, line: bytes) -> None:
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if wanted in shown.casefold():
            found.append({"time": item.time, "rank": item.rank, "stream": item.kind, "text": shown})

    for item in items:
        if ranks is not None and item.rank not in ranks:
            continue
        key = item.rank, item.kind.removesuffix(" ended")
        if item.kind in _STREAMS:
            *lines, rest = (unfinished.pop(key, b"") + item.data).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            if rest:
                unfinished[key] = rest
        elif item.kind in ("said", "shown"):
            lines = item.data.split(b"\n")
        else:
            lines = [unfinished.pop(key)] if key in unfinished else []
        for line in lines:
            add(item, line)
    for (rank, stream), line in unfinished.items():
        add(
            Stored(
                found[-1]["time"] if found else 0.0, "stderr" if stream == "stderr" else "stdout", rank=rank
            ),
            line,
        )
    return list(found)


def shown_stacks(answer: Mapping[str, Any]) -> dict[str, Any]:
    """`summary` is one line, `lines` is all of it: equal stacks are one, the rarest first."""
    stacks = from_json(answer)
    if not stacks:
        return {"summary": "no workers", "lines": []}
    return {"summary": visible(summary(stacks)), "lines": [visible(line) for line in tree_lines(stacks)]}
