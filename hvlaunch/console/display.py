"""The display of one terminal or file: colours, prefixes, merged lines, bars, a status and prompts."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hvlaunch.console.lines import Bars, Key, LineSplitter, Prefix, Screen, Stream, TracebackFilter, visible
from hvlaunch.console.raw_file import RawFile, same_place
from hvlaunch.console.status import AskStatus, count
from hvlaunch.job import ColorPolicy, ConsoleOptions

if TYPE_CHECKING:
    from datetime import datetime

    from hvlaunch.console.merge import Merger
    from hvlaunch.console.notes import UnfinishedLines

__all__ = [
    "Display",
    "LiveRows",
    "Page",
    "Prompts",
    "can_redraw",
    "colored",
    "displays",
    "paint_message",
    "paint_prefix",
    "paint_report",
]

_ESCAPES = r"(\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]|[\x00-\x1f\x7f-\x9f]"
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_FRAME = 0.1
"""Seconds between two drawings."""
_STATUS_DELAY = 1.0
"""Seconds before a status appears: a quick start shows no status."""
_TICK = 1.0
"""Seconds between two questions for the status, which tells how long hvlaunch has waited."""
_BACK, _UP, _CLEAR_BELOW = b"\r", b"\x1b[%dA", b"\x1b[J"


class LiveRows:
    """Rows at the bottom of a terminal. The cursor waits at the start of the first row, or behind a prompt.

    Text that others write meanwhile (the echo of ^C, another program) begins a line, and is overwritten or
    scrolls off. The terminal cuts rows that are longer than its width (DECAWM), and so the width need not be
    known. `now` is in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._shown = False
        self._stale = False
        self._next_frame = 0.0
        self._status: Callable[[], list[bytes]] | None = None
        self._status_from = 0.0
        self._status_rows: list[bytes] | None = None
        self._status_due = 0.0
        self._prompt: bytes | None = None
        self.is_asking = False
        """True while the prompt is shown alone, with the cursor behind it."""

    def status(self, rows: Callable[[], list[bytes]] | None, now: float) -> None:
        """Show a status as the last rows, once hvlaunch has waited for a second; None removes it.

        `rows` is called again each second.
        """
        if rows is not None and self._status is None:
            self._status_from = now + _STATUS_DELAY
        if rows is None:
            # A status that has ended must not stay until the next frame.
            self._next_frame = now
        self._status, self._status_rows, self._stale = rows, None, True

    def prompt(self, row: bytes | None, now: float) -> None:
        """Show this row alone, for the user to type behind; None shows the other rows again.

        The prompt is redrawn only after other output, because drawing removes the user's input.
        """
        if row != self._prompt:
            self._prompt, self.is_asking = row, False
            self._stale, self._next_frame = True, now

    def touch(self) -> None:
        """Record that the bars have changed."""
        self._stale = True

    @property
    def deadline(self) -> float | None:
        """Time of the next drawing without other output, or None if nothing has changed."""
        if self.is_asking:
            return None
        if self._stale:
            return self._next_frame
        if self._status is None:
            return None
        return self._status_from if self._status_rows is None else self._status_due

    def erase(self) -> bytes:
        """Return the bytes that remove the rows; text may follow."""
        shown, self._shown = self._shown, False
        return _BACK + _CLEAR_BELOW if shown else b""

    def draw(self, bars: Sequence[bytes], now: float) -> bytes:
        """Return the bytes that show the bars and the status, from the start of an empty line."""
        self._stale, self._next_frame = False, now + _FRAME
        if self._prompt is not None:
            self._shown = self.is_asking = self._stale = True
            return _NO_WRAP + _printable(self._prompt) + _RESET + _WRAP
        rows = list(bars)
        if self._status is not None and now >= self._status_from:
            if self._status_rows is None or now >= self._status_due:
                self._status_rows, self._status_due = self._status(), now + _TICK
            rows += self._status_rows
        self._shown = bool(rows)
        if not rows:
            return b""
        up = _UP % (len(rows) - 1) if len(rows) > 1 else b""
        return _NO_WRAP + b"\n".join(_printable(row) + _RESET for row in rows) + _WRAP + _BACK + up


def _printable(row: bytes) -> bytes:
    """Return the row without control sequences, which could move the cursor; colours stay."""
    return re.sub(_ESCAPES, lambda match: match[1] or "", row.decode(errors="replace")).encode()


_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""SGR codes by rank: colours of the terminal's theme, without red (trouble), grey and white."""
_RESET = b"\x1b[0m"
_BOLD, _BOLD_RED = "1", "1;31"


def colored(policy: ColorPolicy, *, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return True if colours are used.

    With `auto` on a capable terminal, unless NO_COLOR (https://no-color.org) is set.
    """
    if policy == "auto":
        return can_redraw(terminal=terminal, environ=environ) and not environ.get("NO_COLOR")
    return policy == "always"


def can_redraw(*, terminal: bool, environ: Mapping[str, str]) -> bool:
    """Return True for a terminal that understands escape sequences."""
    return terminal and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def paint_prefix(prefix: bytes, ranks: tuple[int, ...]) -> bytes:
    """Paint the prefix in the rank's colour, or bold for several ranks. A colour left on by a worker ends here."""
    if not prefix:
        return prefix
    code = _PALETTE[ranks[0] % len(_PALETTE)] if len(ranks) == 1 else 1
    return b"\x1b[0;%dm%b%b" % (code, prefix, _RESET)


def paint_message(prefix: bytes) -> bytes:
    """Paint `hvlaunch: ` before a message."""
    return b"\x1b[0;1m%b%b" % (prefix, _RESET)


def paint_report(text: str) -> str:
    """Paint the failure report: headline and advice are bold."""
    return "\n".join(map(_paint_line, text.split("\n")))


def _paint_line(line: str) -> str:
    if line.startswith("hvlaunch: "):
        return _sgr(_BOLD_RED, line)
    if line.startswith("  Try: "):
        return "  " + _sgr(_BOLD, line[2:])
    return line


def _sgr(code: str, text: str) -> str:
    return f"\x1b[0;{code}m{text}\x1b[0m"


_SETTLED = 0.15
"""Seconds without more bytes after which an unfinished line is a prompt."""


class Prompts:
    """Unfinished lines of the workers that read the user's terminal. A line that stays for a moment is a prompt.

    `now` is in seconds of any monotonic clock.
    """

    def __init__(self) -> None:
        self._readers: frozenset[int] = frozenset()
        self._lines: dict[Key, bytes] = {}
        self._due: dict[Key, float] = {}

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn the ranks that read the user's input."""
        self._readers = frozenset(ranks)

    def __contains__(self, key: Key) -> bool:
        return key[0] in self._readers

    def feed(self, key: Key, unfinished: bytes, now: float) -> None:
        """Update the unfinished line of a reader's stream; empty for no line."""
        # Each change begins the wait anew: a line that still grows is no prompt.
        self._lines.pop(key, None)
        self._due.pop(key, None)
        if unfinished:
            self._lines[key], self._due[key] = unfinished, now + _SETTLED

    @property
    def deadline(self) -> float | None:
        """Time when the next line becomes a prompt; in the past if a line is a prompt already."""
        return min(self._due.values(), default=None)

    def current(self, now: float) -> tuple[Key, bytes] | None:
        """Return the prompt to show: the lowest rank's."""
        return min(self._settled(now), default=None)

    def answered(self, now: float) -> list[Key]:
        """End all prompts, because the user has typed a line; return their keys."""
        keys = [key for key, _ in self._settled(now)]
        for key in keys:
            self.feed(key, b"", now)
        return keys

    def _settled(self, now: float) -> list[tuple[Key, bytes]]:
        return [(key, line) for key, line in self._lines.items() if self._due[key] <= now]


Page = list[tuple[RawFile, list[bytes]]]
"""Parts to write, by file and in order."""

_OWN = b"hvlaunch: "
_MOST_LIVE_ROWS = 8
_PATIENCE = 5.0
"""Seconds before a pipe or file gets the status as a line."""


def _new_merger() -> "Merger":
    from hvlaunch.console.merge import Merger  # noqa: PLC0415 - few jobs merge

    return Merger()


def _status_rows(own_prefix: bytes, text: str) -> list[bytes]:
    first, *more = (visible(line).encode(errors="replace") for line in text.split("\n"))
    return [own_prefix + first, *(b"  " + line for line in more)]


class Display:
    """Turns output into pages to write. `now` is in seconds of any monotonic clock."""

    def __init__(
        self, files: Mapping[Stream, RawFile], prefix: Prefix, *, color: bool, live_rows: int, merge: bool
    ) -> None:
        """`live_rows` is the maximum number of bars at the bottom; 0 if the terminal can't redraw."""
        self._files = files
        self._prefix = prefix
        self._color = color
        self._own_prefix = paint_message(_OWN) if color else _OWN
        self._live_rows = live_rows
        self._splitters: dict[Key, LineSplitter] = {}
        self._long: set[Key] = set()
        self._screen = Screen()
        self._bars = Bars(live=live_rows > 0)
        self._merger = _new_merger() if merge else None
        self._live = LiveRows() if live_rows > 0 else None
        self._prompts = Prompts() if live_rows > 0 else None
        self._page: Page = []
        self._waited_for: AskStatus | None = None
        self._patience = self._status_at = 0.0
        self._unfinished: UnfinishedLines | None = None
        self._touched: set[Key] = set()
        """Streams whose recorded unfinished lines may be outdated."""

    def keep_unfinished(self, lines: "UnfinishedLines | None") -> None:
        """Record the beginnings of unfinished lines in `lines` from now on."""
        self._unfinished = lines
        # Lines may be unfinished already.
        self._touched.update(self._splitters)

    def note_unfinished(self) -> None:
        """Record the unfinished lines, after everything given out has been written."""
        if self._touched and self._unfinished is not None:
            for key in self._touched:
                splitter = self._splitters.get(key)
                is_short = splitter is not None and splitter.waiting <= self._unfinished.longest
                self._unfinished.note(key, splitter.unfinished if splitter and is_short else b"")
        self._touched.clear()

    @property
    def oldest(self) -> float | None:
        """Arrival time of the oldest line that waits to be merged, or None."""
        return None if self._merger is None else self._merger.oldest

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn the ranks that read the user's input on this terminal."""
        if self._prompts is not None:
            self._prompts.read_by(ranks)

    def answered(self, now: float) -> None:
        """End the prompt's line: the terminal has echoed the user's line."""
        if self._live is not None and self._prompts is not None and self._live.is_asking:
            for key in self._prompts.answered(now):
                self._splitters[key].forget()

    def learn_places(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn host and local_rank of ranks that will write here."""
        self._prefix.learn_places(places)
        if self._merger is not None:
            self._merger.expect(places)

    def output(self, key: Key, data: bytes, now: float) -> None:
        """Add output of a worker."""
        splitter = self._splitters.get(key)
        if splitter is None:
            # Made on first output: most streams of a large job stay silent for long.
            splitter = self._splitters[key] = LineSplitter()
        text = splitter.feed(data)
        # Whole lines leave nothing to note, unless an unfinished line is on record.
        if self._unfinished is not None and not (data.endswith(b"\n") and key not in self._unfinished.noted):
            self._touched.add(key)
        if splitter.has_states or key in self._bars:
            text = self._bars.feed(key, text, splitter.state, now)
            if self._live is not None:
                self._live.touch()
        if self._prompts is not None and key in self._prompts:
            self._prompts.feed(key, splitter.unfinished, now)
        if text:
            self._lines(key, text, now)

    def end_stream(self, key: Key, now: float) -> None:
        """End the stream: its unfinished line, or its bar's last state, becomes a line."""
        splitter = self._splitters.pop(key, None)
        self._touched.add(key)
        if self._prompts is not None:
            self._prompts.feed(key, b"", now)
        text = splitter.finish() if splitter is not None else b""
        if key in self._bars:
            text = self._bars.feed(key, text, None, now) + self._bars.finish(key)
            if self._live is not None:
                self._live.touch()
        if text:
            self._lines(key, text, now)
        if self._merger is not None:
            self._merger.ended(*key)

    def hide_tracebacks(self) -> None:
        """Hide Python tracebacks on stderr from now on; end_all() tells how many."""
        self._screen.tracebacks = self._screen.tracebacks or TracebackFilter()

    def end_all(self, now: float) -> None:
        """End all streams."""
        # sorted() also copies the keys, which end_stream() removes.
        for key in sorted(self._splitters):
            self.end_stream(key, now)
        self._place_merged(now, everything=True)
        if self._screen.tracebacks is not None and self._screen.tracebacks.count:
            hidden = count(self._screen.tracebacks.count, "traceback")
            self.say(f"{hidden} after Ctrl-C not shown; --verbose shows them")
        self.status(None, now)

    def say(self, text: str) -> None:
        """Add a message of hvlaunch, each line as `hvlaunch: …`."""
        self._own(self._own_prefix, visible(text))

    def show(self, report: str) -> None:
        """Add the failure report."""
        report = visible(report)
        self._own(b"", paint_report(report) if self._color else report)

    def status(self, ask: AskStatus | None, now: float) -> None:
        """Show what hvlaunch waits for; None ends it.

        A terminal shows the status at the bottom. A pipe or file gets a line, and only after a long wait.
        """
        if self._live is not None:
            self._live.status(
                None if ask is None else lambda: _status_rows(self._own_prefix, ask().text), now
            )
            return
        if ask is None or self._waited_for is None:
            self._patience, self._status_at = _PATIENCE, now + _PATIENCE
        self._waited_for = ask

    def _say_status(self, now: float) -> None:
        """In a pipe or file, say the status after some seconds, and again each time the wait has doubled."""
        if self._waited_for is not None and now >= self._status_at:
            first, *more = self._waited_for().text.split("\n")
            self.say(f"{first}: {'; '.join(more)}" if more else first)
            self._status_at = now + self._patience
            # Doubling keeps a log file short during a long wait.
            self._patience *= 2

    @property
    def deadline(self) -> float | None:
        """Time of the next page without new input."""
        times = [self._bars.deadline, self._merger.deadline if self._merger is not None else None]
        times.append(self._status_at if self._waited_for is not None else None)
        # Rows and prompts can be drawn only from the start of a line.
        if self._live is not None and self._prompts is not None and self._screen.is_whole:
            times += [self._live.deadline, None if self._live.is_asking else self._prompts.deadline]
        return min((time for time in times if time is not None), default=None)

    def page(self, now: float) -> Page:
        """Return the parts to write now, in order."""
        self._say_status(now)
        for key, line in self._bars.due(now):
            self._lines(key, line, now)
        self._place_merged(now)
        if self._live is not None and self._prompts is not None:
            prompt = self._prompts.current(now)
            self._live.prompt(None if prompt is None else self._row(*prompt), now)
        page, self._page = self._page, []
        return page if self._live is None else self._with_live_rows(self._live, page, now)

    def _lines(self, key: Key, text: bytes, now: float) -> None:
        if self._screen.tracebacks is not None and key[1] == "stderr":
            text = self._screen.tracebacks.feed(key, text)
            if not text:
                return
        is_long = not text.endswith(b"\n")
        if self._merger is None:
            self._place(key, (key[0],), key[1], text)
        elif is_long or key in self._long:
            self._place_merged(now, everything=True)
            self._place(key, (key[0],), key[1], text)
            # A line in pieces can't be compared with other ranks' lines, so it is not merged.
            (self._long.add if is_long else self._long.discard)(key)
        else:
            self._merger.add(*key, text, now)

    def _place_merged(self, now: float, *, everything: bool = False) -> None:
        if self._merger is not None:
            for ranks, stream, text in self._merger.take_lines(now, everything=everything):
                self._place((ranks, stream), ranks, stream, text)

    def _place(self, owner: object, ranks: tuple[int, ...], stream: Stream, text: bytes) -> None:
        prefix = self._prefix.text_for(ranks, stream)
        if self._color:
            prefix = paint_prefix(prefix, ranks)
        self._append(self._files[stream], self._screen.arrange(owner, prefix, text))

    def _own(self, prefix: bytes, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        if data and not data.endswith(b"\n"):
            data += b"\n"
        self._append(self._files["stderr"], self._screen.arrange(prefix, prefix, data))

    def _append(self, file: RawFile, parts: list[bytes]) -> None:
        if not parts:
            return
        if self._page and self._page[-1][0] is file:
            self._page[-1][1].extend(parts)
        else:
            self._page.append((file, parts))

    def _with_live_rows(self, live: "LiveRows", page: Page, now: float) -> Page:
        """Surround the page with the removal and the drawing of the live rows."""
        # Nothing else is due, so the rows are drawn only at their own times.
        if not page:
            if live.deadline is None or now < live.deadline or not self._screen.is_whole:
                return []
            page = [(next(iter(self._files.values())), [])]
        page[0][1].insert(0, live.erase())
        if self._screen.is_whole:
            page[-1][1].append(live.draw(self._bar_rows(), now))
        return page

    def _bar_rows(self) -> list[bytes]:
        bars = self._bars.current()
        if not bars:
            return []
        # At most half of the terminal: the output above must stay readable.
        height = next(iter(self._files.values())).height()
        most = max(1, min(self._live_rows, height // 2))
        rows = [self._row(key, bars[key]) for key in sorted(bars)[:most]]
        if len(bars) > most > 1:
            rows.append(b"... and %d more" % (len(bars) - most))
        return rows

    def _row(self, key: Key, text: bytes) -> bytes:
        rank, stream = key
        prefix = self._prefix.text_for((rank,), stream)
        return (paint_prefix(prefix, (rank,)) if self._color else prefix) + text


def displays(
    out: RawFile,
    err: RawFile,
    options: ConsoleOptions,
    environ: Mapping[str, str],
    now: "Callable[[], datetime] | None",
) -> dict[Stream, Display]:
    """Return the display of each stream, stderr last; one display if both end at the same place."""

    def display(files: Mapping[Stream, RawFile], rows: int) -> Display:
        is_terminal = next(iter(files.values())).is_terminal
        return Display(
            files,
            Prefix(options.prefix, now=now, labels=options.labels),
            color=colored(options.color, terminal=is_terminal, environ=environ),
            live_rows=rows if can_redraw(terminal=is_terminal, environ=environ) else 0,
            merge=options.merge,
        )

    if same_place(out, err):
        shared = display({"stdout": out, "stderr": err}, _MOST_LIVE_ROWS)
        return {"stdout": shared, "stderr": shared}
    # The program that reads a pipe may write to the same terminal: then only one row can be redrawn without harm.
    return {
        "stdout": display({"stdout": out}, 1 if err.is_pipe else _MOST_LIVE_ROWS),
        "stderr": display({"stderr": err}, 1 if out.is_pipe else _MOST_LIVE_ROWS),
    }
