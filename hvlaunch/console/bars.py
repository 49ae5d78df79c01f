"""Progress bars: redrawn lines, kept apart from lines that stay."""

import re

from hvlaunch.console.lines import Key

__all__ = ["INTERVAL", "Bars"]

INTERVAL = 0.5
"""Seconds between two states of one bar that are printed as lines."""

_SETTLED = 0.2
"""Seconds after which an unfinished state counts as complete."""

_SEGMENTS = rb"[^\r\n]*[\r\n]|[^\r\n]+"
_INVISIBLE = rb"\x1b\[[0-?]*[ -/]*[@-~]|\s"


class _Bar:
    __slots__ = ("changed", "erased", "shown", "state", "unfinished")

    def __init__(self) -> None:
        # The last complete state that is not printed yet.
        self.state = b""
        # The bytes after it.
        self.unfinished = b""
        self.changed = 0.0
        # The last state that was printed as a line.
        self.shown = b""
        # True after the worker has overwritten its bar with blanks, as tqdm does at the end.
        self.erased = False


class Bars:
    """The bars of many streams, by key. `now` is in seconds of any monotonic clock.

    On a terminal (`live`), `current` returns the bars to draw. Elsewhere the last state of each INTERVAL is
    printed as a line: `due` returns these lines, and `deadline` tells when.
    """

    def __init__(self, *, live: bool) -> None:
        self.deadline: float | None = None
        self._live = live
        self._bars: dict[Key, _Bar] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._bars

    def feed(self, key: Key, text: bytes, unfinished: bytes | None, now: float) -> bytes:
        r"""Return the part of `text` that stays: lines that end with `\n`.

        `text` is the result of LineSplitter.feed, and `unfinished` its state afterwards. A line that ends a bar
        stays in the bar's last place. A line that repeats the last printed state is left out.
        """
        bar = self._bars.setdefault(key, _Bar())
        lines = []
        for segment in re.findall(_SEGMENTS, text):
            if segment.endswith(b"\r"):
                self._draw(bar, segment[:-1])
                continue
            if not bar.shown or bar.state or segment[:-1] != bar.shown:
                lines.append(segment)
            bar.shown = b""
            if not bar.erased:
                bar.state = b""
        if unfinished and _is_blank(unfinished):
            self._draw(bar, unfinished)
            unfinished = None
        unfinished = unfinished or b""
        if text or unfinished != bar.unfinished:
            bar.unfinished, bar.changed = unfinished, now
        if not (bar.state or bar.unfinished or bar.shown):
            del self._bars[key]
        elif not self._live and self.deadline is None:
            self.deadline = now + INTERVAL
        return b"".join(lines)

    def finish(self, key: Key) -> bytes:
        """Return the bar's last state as a line, if the stream ended with it."""
        bar = self._bars.pop(key, None)
        return bar.state + b"\n" if bar is not None and bar.state else b""

    def current(self) -> dict[Key, bytes]:
        """Return the visible bars."""
        shown = ((key, bar.unfinished or bar.state) for key, bar in self._bars.items())
        return {key: text for key, text in shown if text}

    def due(self, now: float) -> list[tuple[Key, bytes]]:
        """Return the lines to print now, with their keys; an empty list before `deadline`."""
        if self.deadline is None or now < self.deadline:
            return []
        self.deadline = None
        lines = []
        for key, bar in list(self._bars.items()):
            settled = now - bar.changed >= _SETTLED
            text = bar.unfinished if settled and bar.unfinished else bar.state
            # A bar that stands still is not printed again and again.
            if text and text != bar.shown:
                lines.append((key, text + b"\n"))
                bar.shown = text
            bar.state = b""
            if bar.erased:
                bar.shown, bar.erased = b"", False
            if bar.unfinished and not settled:
                self.deadline = now + INTERVAL
            if not (bar.unfinished or bar.shown):
                del self._bars[key]
        return lines

    def _draw(self, bar: _Bar, state: bytes) -> None:
        blank = _is_blank(state)
        bar.erased = blank and not self._live
        # A blank state erases the bar; its last visible state stays for a pipe.
        if not blank:
            bar.state = b"" if state == bar.shown else state
        elif self._live:
            bar.state = b""


def _is_blank(state: bytes) -> bool:
    return not re.sub(_INVISIBLE, b"", state)
