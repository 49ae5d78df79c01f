"""What a notebook displays, by a display that is not Jupyter's."""

import sys
from types import ModuleType
from typing import Any

import pytest

from hvlaunch.api.launcher import notebook_bar
from hvlaunch.console.status import Status


class Handle:
    """Of what is displayed."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, data: Any, *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    found, kernel = Handle(), ModuleType("kernel")
    ipython: Any = ModuleType("IPython")

    def display(data: Any, *, raw: bool, display_id: bool) -> Handle:
        assert display_id
        found.update(data, raw=raw)
        return found

    ipython.get_ipython = lambda: kernel
    ipython.display = ModuleType("display")
    ipython.display.display = display
    kernel.kernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return found


def test_no_bar_outside_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_bar() is None
    terminal: Any = ModuleType("IPython")
    terminal.get_ipython = lambda: ModuleType("shell")
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert notebook_bar() is None


def test_each_status_is_in_the_place_of_the_last_one(handle: Handle) -> None:
    show = notebook_bar()
    assert show is not None
    show(None)
    assert handle.shown == []
    show(Status("connecting 1/4, 2 s\nlog in: a<b>", 1, 4))
    show(Status("waiting for the first hosts of the pool"))
    show(None)
    assert [one["text/html"] for one in handle.shown] == [
        '<progress value="1" max="4"></progress> connecting 1/4, 2 s<br>log in: a&lt;b&gt;',
        "<progress></progress> waiting for the first hosts of the pool",
        "",
    ]
    assert handle.shown[0]["text/plain"] == "connecting 1/4, 2 s\nlog in: a<b>"
