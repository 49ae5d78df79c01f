"""What one terminal, pipe or file shows: lines, progress bars, messages, and what is being printed there."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from hvlaunch.console.bars import Bars
from hvlaunch.console.color import can_redraw, colored, paint_message, paint_prefix, paint_report
from hvlaunch.console.lines import Key, LineSplitter, Screen, Stream
from hvlaunch.console.prefix import Prefix
from hvlaunch.console.raw_file import RawFile, same_place
from hvlaunch.console.status import AskStatus
from hvlaunch.console.visible import visible
from hvlaunch.job import ConsoleOptions

if TYPE_CHECKING:
    from datetime import datetime

    from hvlaunch.console.live import LiveRows
    from hvlaunch.console.merge import Merger
    from hvlaunch.console.notes import UnfinishedLines
    from hvlaunch.console.prompts import Prompts

__all__ = ["Display", "Page", "displays"]

Page = list[tuple[RawFile, list[bytes]]]
"""Parts for each file, one after the other."""

_OWN = b"hvlaunch: "
_MOST_LIVE_ROWS = 8
_PATIENCE = 5.0
"""Seconds before a pipe or a file is told what hvlaunch waits for."""


def _new_merger() -> "Merger":
    from hvlaunch.console.merge import Merger  # noqa: PLC0415 - few jobs merge

    return Merger()


def _new_live_rows() -> "LiveRows":
    from hvlaunch.console.live import LiveRows  # noqa: PLC0415 - only a terminal has them

    return LiveRows()


def _new_prompts() -> "Prompts":
    from hvlaunch.console.prompts import Prompts  # noqa: PLC0415 - as those rows

    return Prompts()


class Display:
    """Turns output into what is to be written. `now` is in seconds, of any clock that never goes back."""

    def __init__(
        self, files: Mapping[Stream, RawFile], prefix: Prefix, *, color: bool, live_rows: int, merge: bool
    ) -> None:
        """`live_rows` is how many progress bars may be drawn at the bottom; 0 where this is no such terminal."""
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
        self._live = _new_live_rows() if live_rows > 0 else None
        self._prompts = _new_prompts() if live_rows > 0 else None
        self._page: Page = []
        self._waited_for: AskStatus | None = None
        self._patience = self._status_at = 0.0
        self._unfinished: UnfinishedLines | None = None
        self._touched: set[Key] = set()
        """Those whose unfinished lines may be others than was noted."""

    def keep_unfinished(self, lines: "UnfinishedLines | None") -> None:
        """Note there, from now on, how lines begin that are not shown yet."""
        self._unfinished = lines
        self._touched.update(self._splitters)

    def note_unfinished(self) -> None:
        """All that was given out is written."""
        if self._touched and self._unfinished is not None:
            for key in self._touched:
                splitter = self._splitters.get(key)
                is_short = splitter is not None and splitter.waiting <= self._unfinished.longest
                self._unfinished.note(key, splitter.unfinished if splitter and is_short else b"")
        self._touched.clear()

    @property
    def oldest(self) -> float | None:
        """When the oldest line came that is still to be merged; None where none is."""
        return None if self._merger is None else self._merger.oldest

    def read_by(self, ranks: Iterable[int]) -> None:
        """Learn which ranks read what the user types on this terminal."""
        if self._prompts is not None:
            self._prompts.read_by(ranks)

    def answered(self, now: float) -> None:
        """The user has typed a line, and the terminal has echoed it: the prompt's line has ended there."""
        if self._live is not None and self._prompts is not None and self._live.is_asking:
            for key in self._prompts.answered(now):
                self._splitters[key].forget()

    def place(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Learn of ranks that will write here, with host and local_rank of each."""
        self._prefix.place(places)
        if self._merger is not None:
            self._merger.expect(places)

    def output(self, key: Key, data: bytes, now: float) -> None:
        """What a worker wrote."""
        splitter = self._splitters.get(key)
        if splitter is None:
            splitter = self._splitters[key] = LineSplitter()
        text = splitter.feed(data)
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

    def end(self, key: Key, now: float) -> None:
        """The stream has ended: its unfinished line, or the last state of its bar, is a line now."""
        splitter = self._splitters.pop(key, None)
        self._touched.add(key)
        if self._prompts is not None:
            self._prompts.feed(key, b"", now)
        text = splitter.end() if splitter is not None else b""
        if key in self._bars:
            text = self._bars.feed(key, text, None, now) + self._bars.end(key)
            if self._live is not None:
                self._live.touch()
        if text:
            self._lines(key, text, now)
        if self._merger is not None:
            self._merger.ended(*key)

    def end_all(self, now: float) -> None:
        """Nothing more of workers will come."""
        for key in sorted(self._splitters):
            self.end(key, now)
        self._place_merged(now, everything=True)
        self.status(None, now)

    def say(self, text: str) -> None:
        """A message of hvlaunch's own, each of its lines as `hvlaunch: …`."""
        self._own(self._own_prefix, visible(text))

    def show(self, report: str) -> None:
        """The failure report."""
        report = visible(report)
        self._own(b"", paint_report(report) if self._color else report)

    def status(self, ask: AskStatus | None, now: float) -> None:
        """What hvlaunch waits for; None: for nothing any more.

        A terminal shows it below all else. Elsewhere it is one line, and only where hvlaunch waits long.
        """
        if self._live is not None:
            self._live.status(None if ask is None else lambda: self._status_rows(ask().text), now)
            return
        if ask is None or self._waited_for is None:
            self._patience, self._status_at = _PATIENCE, now + _PATIENCE
        self._waited_for = ask

    def _status_rows(self, text: str) -> list[bytes]:
        first, *more = (visible(line).encode(errors="replace") for line in text.split("\n"))
        return [self._own_prefix + first, *(b"  " + line for line in more)]

    def _say_status(self, now: float) -> None:
        """In a pipe or a file: once it has lasted some seconds, and then each time that it has lasted twice as long."""
        if self._waited_for is not None and now >= self._status_at:
            first, *more = self._waited_for().text.split("\n")
            self.say(f"{first}: {'; '.join(more)}" if more else first)
            self._status_at = now + self._patience
            self._patience *= 2

    @property
    def deadline(self) -> float | None:
        """When to ask for a page, even if nothing is put in until then."""
        known = [self._bars.deadline, self._merger.deadline if self._merger is not None else None]
        known.append(self._status_at if self._waited_for is not None else None)
        if self._live is not None and self._prompts is not None and self._screen.is_whole:
            known += [self._live.deadline, None if self._live.is_asking else self._prompts.deadline]
        return min((time for time in known if time is not None), default=None)

    def page(self, now: float) -> Page:
        """What is to be written now, in order."""
        self._say_status(now)
        for key, line in self._bars.due(now):
            self._lines(key, line, now)
        self._place_merged(now)
        if self._live is not None and self._prompts is not None:
            found = self._prompts.current(now)
            self._live.prompt(None if found is None else self._row(*found), now)
        page, self._page = self._page, []
        return page if self._live is None else self._with_live_rows(self._live, page, now)

    def _lines(self, key: Key, text: bytes, now: float) -> None:
        is_long = not text.endswith(b"\n")
        if self._merger is None:
            self._place(key, (key[0],), key[1], text)
        elif is_long or key in self._long:
            self._place_merged(now, everything=True)
            self._place(key, (key[0],), key[1], text)
            (self._long.add if is_long else self._long.discard)(key)
        else:
            self._merger.add(*key, text, now)

    def _place_merged(self, now: float, *, everything: bool = False) -> None:
        if self._merger is not None:
            for ranks, stream, text in self._merger.take(now, everything=everything):
                self._place((ranks, stream), ranks, stream, text)

    def _place(self, owner: object, ranks: tuple[int, ...], stream: Stream, text: bytes) -> None:
        prefix = self._prefix.of(ranks, stream)
        if self._color:
            prefix = paint_prefix(prefix, ranks)
        self._append(self._files[stream], self._screen.place(owner, prefix, text))

    def _own(self, prefix: bytes, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        if data and not data.endswith(b"\n"):
            data += b"\n"
        self._append(self._files["stderr"], self._screen.place(prefix, prefix, data))

    def _append(self, file: RawFile, parts: list[bytes]) -> None:
        if not parts:
            return
        if self._page and self._page[-1][0] is file:
            self._page[-1][1].extend(parts)
        else:
            self._page.append((file, parts))

    def _with_live_rows(self, live: "LiveRows", page: Page, now: float) -> Page:
        """The page, with the live rows removed before it and drawn after it."""
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
        height = next(iter(self._files.values())).height()
        most = max(1, min(self._live_rows, height // 2))
        rows = [self._row(key, bars[key]) for key in sorted(bars)[:most]]
        if len(bars) > most > 1:
            rows.append(b"... and %d more" % (len(bars) - most))
        return rows

    def _row(self, key: Key, text: bytes) -> bytes:
        rank, stream = key
        prefix = self._prefix.of((rank,), stream)
        return (paint_prefix(prefix, (rank,)) if self._color else prefix) + text


def displays(
    out: RawFile,
    err: RawFile,
    options: ConsoleOptions,
    environ: Mapping[str, str],
    now: "Callable[[], datetime] | None",
) -> dict[Stream, Display]:
    """Where each stream goes, stderr last; one display where both end in the same place."""

    def display(files: Mapping[Stream, RawFile], rows: int) -> Display:
        is_terminal = next(iter(files.values())).is_terminal
        return Display(
            files,
            Prefix(options.prefix, now=now),
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
