"""What comes in front of the full screen of `hvlaunch top`: text to be read, and questions."""

import threading
from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static

__all__ = ["Question", "Reading", "WordQuestion"]

_AGAIN = 1.0


class Reading(ModalScreen[None]):
    """A text that `read` gives, which may take its time; read again and again where it grows (`is_repeated`)."""

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
        threading.Thread(target=self._follow, name="reading", daemon=True).start()

    def on_unmount(self) -> None:
        self._is_left.set()

    def _follow(self) -> None:
        while not self._is_left.is_set():
            text = self._read()
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
        was_at_end = self._is_repeated and scroll.scroll_offset.y >= scroll.max_scroll_y
        self.query_one("#text", Static).update(text or "nothing yet")
        if was_at_end:
            scroll.scroll_end(animate=False)


_BOX = """
{name} {{ align: center middle; }}
{name} Vertical {{ width: 60; height: auto; border: thick $accent; background: $surface; padding: 1 2; }}
"""


class Question(ModalScreen[bool]):
    """Yes or no; anything but y is no."""

    CSS = _BOX.format(name="Question")
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
    """A word, or nothing."""

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
