"""The last line of each rank, and how much it has printed. Pure."""

import re
from collections import Counter, deque

from hvlaunch.console.lines import visible

__all__ = ["Tails"]

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
