"""The full screen of `hvlaunch top`, with textual: the table, text to read, and questions."""

import threading
from collections.abc import Callable
from datetime import datetime
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from hvlaunch.cli.jobs.feed import JobFeed
from hvlaunch.console.output_store import StoreReader
from hvlaunch.errors import HvlaunchError
from hvlaunch.view.model import HostRow, RankRow, View
from hvlaunch.view.text import (
    COLUMNS,
    FAILURE,
    FEW,
    header,
    host_cells,
    newest_lines_with,
    rank_cells,
    shown_stacks,
    strip,
    verdict,
    worst_ranks,
)

__all__ = ["Reading", "TopScreen", "WordQuestion", "YesNoQuestion"]

_AGAIN = 1.0


class Reading(ModalScreen[None]):
    """A text from `read`, which may take long; read again at intervals if it grows (`is_repeated`)."""

    CSS = """
    Reading { background: $background; }
    #title { height: 1; text-style: bold; padding: 0 1; background: $panel; }
    #text { padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "back", key_display="esc")]

    def __init__(self, title: str, read: Callable[[], str], *, is_repeated: bool = True) -> None:
        super().__init__()
        self._heading = title
        self._read = read
        self._is_repeated = is_repeated
        self._is_left = threading.Event()

    def compose(self) -> ComposeResult:
        yield Static(self._heading, id="title", markup=False)
        yield VerticalScroll(Static("asking ...", id="text", markup=False), id="scroll")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#scroll", VerticalScroll).focus()
        # A thread of its own: the driver's answer may take seconds.
        threading.Thread(target=self._follow, name="reading", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_left.set()

    def _follow(self) -> None:
        while not self._is_left.is_set():
            text = self._read()
            # The user may have left while the driver was asked.
            if self._is_left.is_set() or not self.app.is_running:
                return
            self.app.call_from_thread(self._show, text)
            if not self._is_repeated:
                return
            self._is_left.wait(_AGAIN)

    def _show(self, text: str) -> None:
        if not self.is_mounted:
            return
        scroll = self.query_one("#scroll", VerticalScroll)
        # Follow the end only if the user is there.
        was_at_end = self._is_repeated and scroll.scroll_offset.y >= scroll.max_scroll_y
        self.query_one("#text", Static).update(text or "nothing yet")
        if was_at_end:
            scroll.scroll_end(animate=False)


_BOX = """
{name} {{ align: center middle; }}
{name} Vertical {{ width: 60; height: auto; border: thick $accent; background: $surface; padding: 1 2; }}
"""


class YesNoQuestion(ModalScreen[bool]):
    """A question; any key but y means no."""

    CSS = _BOX.format(name="YesNoQuestion")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "no", key_display="n"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Vertical(Static(f"{self._text}\n\ny: yes    n: no", markup=False))

    def action_answer(self, is_meant: bool) -> None:
        self.dismiss(is_meant)


class WordQuestion(ModalScreen[str]):
    """Asks for a word; empty if the user leaves."""

    CSS = _BOX.format(name="WordQuestion")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('')", "back")]

    def __init__(self, text: str, word: str) -> None:
        super().__init__()
        self._text = text
        self._word = word

    def compose(self) -> ComposeResult:
        yield Vertical(Static(self._text, markup=False), Input(self._word))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value.strip())


_TONES = {
    "good": "bold white on dark_green",
    "wait": "bold black on yellow3",
    "bad": "bold white on dark_red",
}
_ROUND_STYLES = ("on dark_blue", "on purple4")
_STATE_STYLES = {
    "working": "green",
    "ready": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "connecting": "yellow",
}
_LINES = 2000


class TopScreen(App[None]):
    """Shows a feed's views until the job ends or the user leaves."""

    TITLE = "hvlaunch top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #verdict { height: auto; max-height: 2; padding: 0 1; }
    #head { height: 1; text-style: bold; padding: 0 1; background: $panel; }
    #rounds { height: 1; padding: 0 1; }
    #table { height: 1fr; }
    #filter { display: none; }
    #filter.is-open { display: block; }
    #past { height: 9; border-top: solid $accent; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "stacks", "stacks"),
        Binding("o", "output", "output"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("f", "fold", "fold"),
        Binding("k", "signal", "signal"),
        Binding("x", "stop", "stop"),
        Binding("q", "quit", "leave"),
        Binding("escape", "clear", "clear", show=False),
    ]

    def __init__(self, feed: JobFeed) -> None:
        super().__init__()
        self._feed = feed
        self._view: View | None = None
        self._is_folded: bool | None = None
        self._pattern = ""
        self._rows: list[HostRow | RankRow] = []

    def compose(self) -> ComposeResult:
        yield Static("", id="verdict", markup=False)
        yield Static("", id="head", markup=False)
        yield Static("", id="rounds")
        yield Input(placeholder="host, rank, state, line", id="filter")
        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
        yield VerticalScroll(Static("", id="moments", markup=False), id="past")
        yield Footer()

    def on_mount(self) -> None:
        table = self._table
        for name in COLUMNS:
            table.add_column(Text(name, "bold"), key=name)
        table.focus()
        # A thread of ours: the screen would wait for a worker of textual when the user leaves.
        threading.Thread(target=self._follow, name="top", daemon=True).start()

    @property
    def _table(self) -> "DataTable[Text]":
        return self.query_one("#table", DataTable)

    def _follow(self) -> None:
        """Show the feed's views, in a thread of its own: the feed waits for the driver."""
        while self.is_running:
            try:
                view = self._feed.next()
            except HvlaunchError as error:
                self._tell(self.notify, str(error))
                return
            if view is not None:
                self._tell(self._show, view)
            if view is None or self._feed.has_ended:
                self._tell(self.notify, "the job has ended; q leaves", timeout=3600)
                return

    def _tell(self, call: object, *arguments: object, **options: object) -> None:
        if self.is_running:
            # textual's objects belong to the main thread.
            self.call_from_thread(call, *arguments, **options)  # type: ignore[arg-type]

    def _show(self, view: View) -> None:
        """Draw a view."""
        self._view = view
        judged = verdict(view)
        summary = Text.assemble((f" {judged.text} ", _TONES[judged.tone]), "  ", judged.detail)
        self.query_one("#verdict", Static).update(summary)
        self.query_one("#head", Static).update(header(view))
        rounds = self.query_one("#rounds", Static)
        rounds.update(_rounds(view, max(10, self.size.width - 2)))
        rounds.display = view.round is not None
        lines = [
            Text.assemble(
                (f"{datetime.fromtimestamp(moment.time).astimezone():%H:%M:%S}  ", "dim"),
                (moment.text, "red" if moment.kind == "failure" else ""),
            )
            for moment in view.moments
        ]
        # Scroll only if the user has not scrolled up to read.
        past = self.query_one("#past", VerticalScroll)
        was_at_end = past.scroll_offset.y >= past.max_scroll_y
        self.query_one("#moments", Static).update(Text("\n").join(lines))
        if was_at_end:
            past.scroll_end(animate=False)
        self._fill(view)

    def _fill(self, view: View) -> None:
        """Fill the table, and keep the cursor on its row."""
        table = self._table
        # Large jobs begin folded; the user's choice counts from then on.
        is_folded = len(view.ranks) > FEW if self._is_folded is None else self._is_folded
        selected = self._under_cursor
        scroll = table.scroll_offset
        table.clear()
        self._rows = [row for row in _rows(view, is_folded=is_folded) if self._fits(row)]
        for row in self._rows:
            cells = host_cells(row) if isinstance(row, HostRow) else rank_cells(row)
            if isinstance(row, RankRow) and is_folded:
                cells = (row.host, *cells[1:])
            table.add_row(*_styled(row, cells))
        keys = [_key(row) for row in self._rows]
        if selected is not None and selected in keys:
            table.cursor_coordinate = Coordinate(keys.index(selected), 0)
        # clear() has scrolled to the top.
        table.scroll_to(y=scroll.y, animate=False, force=True)

    @property
    def _under_cursor(self) -> tuple[str, int] | None:
        row = self._table.cursor_row
        return _key(self._rows[row]) if 0 <= row < len(self._rows) else None

    def _fits(self, row: HostRow | RankRow) -> bool:
        cells = (
            host_cells(row) if isinstance(row, HostRow) else (row.host, f"rank {row.rank}", *rank_cells(row))
        )
        return self._pattern in " ".join(cells).casefold()

    # Actions of keys:

    def action_fold(self) -> None:
        if self._view is not None:
            was = len(self._view.ranks) > FEW if self._is_folded is None else self._is_folded
            self._is_folded = not was
            self._fill(self._view)

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.add_class("is-open")
        line.focus()

    def action_clear(self) -> None:
        line = self.query_one("#filter", Input)
        line.value = ""
        line.remove_class("is-open")
        self._table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._pattern = event.value.strip().casefold()
        if self._view is not None:
            self._fill(self._view)

    def on_input_submitted(self) -> None:
        self._table.focus()

    def on_data_table_row_selected(self) -> None:
        self.action_output()

    def action_output(self) -> None:
        """Show output of the rank under the cursor, or of the host's ranks."""
        if self._under_cursor is None:
            return
        row = self._rows[self._table.cursor_row]
        ranks = {row.rank} if isinstance(row, RankRow) else {rank_row.rank for rank_row in row.ranks}
        title = f"rank {row.rank}" if isinstance(row, RankRow) else f"host {row.host}"
        self.push_screen(Reading(f"output of {title}", lambda: self._output(ranks)))

    def _output(self, ranks: set[int]) -> str:
        reader = StoreReader(self._feed.job.directory)
        # Two segments: the newest may have just begun.
        reader.seek_newest(2)
        lines = newest_lines_with(reader.read(), "", ranks, _LINES)
        reader.close()
        return "\n".join(f"[{line['rank']}] {line['text']}" for line in lines)

    def action_stacks(self) -> None:
        self.push_screen(Reading("stacks", self._stacks, is_repeated=False))

    def _stacks(self) -> str:
        try:
            answer = self._feed.control.post("/stacks", {"ranks": None, "native": False})
        except HvlaunchError as error:
            return str(error)
        if answer is None:
            return "the driver of this job can't take stacks"
        shown = shown_stacks(answer)
        return "\n".join([shown["summary"], "", *shown["lines"]])

    def action_signal(self) -> None:
        def send(name: str | None) -> None:
            if name:
                self._order("/signal", {"signal": name})

        self.push_screen(WordQuestion("Send a signal to all workers: which?", "USR1"), send)

    def action_stop(self) -> None:
        def stop(is_meant: bool | None) -> None:
            if is_meant:
                self._order("/stop", {"kill": False})

        self.push_screen(YesNoQuestion(f"Stop {self._feed.job.label}?"), stop)

    def _order(self, path: str, body: dict[str, object]) -> None:
        try:
            self._feed.control.post(path, body)
        except HvlaunchError as error:
            self.notify(str(error), severity="error")


def _rows(view: View, *, is_folded: bool) -> list[HostRow | RankRow]:
    """Return hosts, each followed by its ranks; folded, the worst ranks and then hosts alone."""
    if is_folded:
        return [*worst_ranks(view)[:5], *view.hosts]
    rows: list[HostRow | RankRow] = []
    for host in view.hosts:
        rows += [host, *host.ranks]
    return rows


def _key(row: HostRow | RankRow) -> tuple[str, int]:
    return row.host, row.rank if isinstance(row, RankRow) else -1


def _styled(row: HostRow | RankRow, cells: tuple[str, ...]) -> list[Text]:
    """Return cells with styles: bold for hosts, a colour for each state, and a mark for the slowest rank."""
    whole = "bold" if isinstance(row, HostRow) else ""
    texts = [Text(cell, whole) for cell in cells]
    state = (
        row.state
        if isinstance(row, RankRow) or row.state != "ready"
        else (row.ranks[0].state if row.ranks else "ready")
    )
    if cells[2].startswith("stopped"):
        state = "stopped"
    texts[2].stylize(_STATE_STYLES.get(state, "bold red"))
    if isinstance(row, RankRow) and row.is_slowest:
        texts[1].stylize("bold yellow")
    texts[-1].no_wrap = True
    return texts


def _rounds(view: View, width: int) -> Text:
    """Return the time line of rounds."""
    text = Text(no_wrap=True)
    last = ""
    for letter in strip(view, width):
        style = (
            "bold white on red"
            if letter == FAILURE
            else _ROUND_STYLES[int(letter) % 2]
            if letter.isdigit()
            else "dim"
        )
        text.append(" " if letter == last and letter.isdigit() else letter, style)
        last = letter
    return text
