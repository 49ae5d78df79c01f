"""Progress bars: redrawn lines, kept apart from lines that stay."""

import re
from collections.abc import Callable

from hvlaunch.console.lines import Key
from hvlaunch.console.recent import Origin

__all__ = ["INTERVAL", "BarStates", "Bars"]

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


_PAUSE = 1.0
"""Seconds between two stored states of a bar."""

State = tuple[bytes, Origin | None]


class BarStates:
    """Selects states of progress bars for the output store: one per second, because all states would fill it.

    The newest state of each stream is held back until the last stored state is old enough, or other output
    comes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[Key, State] = {}
        self._next: dict[Key, float] = {}
        """Earliest time for the next stored state."""
        self._begun: set[Key] = set()
        """Streams whose last stored state is incomplete."""

    def add(self, key: Key, data: bytes, origin: Origin | None) -> list[State]:
        """Return the states to store now: held-back states and this one. due() and release() return the others
        later.
        """
        before = self._held.pop(key, None)
        if b"\n" in data or not (data.startswith(b"\r") or data.endswith(b"\r")):
            return self._kept(key, [(data, origin)] if before is None else [before, (data, origin)])
        if before is not None:
            data = _newest(before[0] + data, is_begun=key in self._begun)
        now = self._clock()
        # Too early: hold it back, and let a newer state replace it.
        if now < self._next.get(key, 0.0):
            self._held[key] = data, origin
            return []
        self._next[key] = now + _PAUSE
        return self._kept(key, [(data, origin)])

    def release(self, key: Key) -> State | None:
        """Return the held-back state of a stream that has ended."""
        self._begun.discard(key)
        return self._held.pop(key, None)

    def due(self) -> list[tuple[Key, State]]:
        """Return the states that have been held back long enough."""
        if not self._held:
            return []
        now = self._clock()
        keys = [key for key in self._held if now >= self._next[key]]
        self._next.update(dict.fromkeys(keys, now + _PAUSE))
        return [(key, state) for key in keys for state in self._kept(key, [self._held.pop(key)])]

    @property
    def deadline(self) -> float | None:
        """Time of the next due state."""
        return min((self._next[key] for key in self._held), default=None)

    def _kept(self, key: Key, states: list[State]) -> list[State]:
        (self._begun.discard if states[-1][0].endswith((b"\r", b"\n")) else self._begun.add)(key)
        return states


def _newest(states: bytes, *, is_begun: bool) -> bytes:
    """Drop states that later states overwrite: keep the last complete state and the bytes after it.

    Chunks may end inside a state. If the stored part of a state `is_begun`, its end is kept too.
    """
    first, last = states.find(b"\r"), states.rfind(b"\r")
    begin = max(first, states.rfind(b"\r", 0, last))
    return (states[:first] if is_begun else b"") + states[begin:]
