"""Functions of a notebook: in a real kernel, and what is displayed by a display that is not Jupyter's."""

import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from hvlaunch.api.launcher import notebook_bar
from hvlaunch.console.status import Status
from tests.testhosts.hosts import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples/digits.ipynb"
LIGHT = Path(__file__).parents[2] / "light"
LIMIT = 200
pytestmark = pytest.mark.timeout(2 * LIMIT)

LINES = """\
import os, hvlaunch

def count(lines):
    for number in range(lines):
        print("line", number)
    return os.environ["RANK"], lines

hvlaunch.run(count, (3000,), np=2)
"""
WRONG = """\
def divide(number):
    return number / int(os.environ["RANK"])

hvlaunch.run(divide, (1,), np=2, quiet=True)
"""
ENDLESS = """\
import time

def wait(path):
    with open(f"{path}/{os.getpid()}", "w"):
        time.sleep(600)

hvlaunch.run(wait, (%r,), np=2, quiet=True)
"""
SLOW = """\
from pathlib import Path

script = Path(%r)
script.write_text(f"#!/bin/sh\\nuntil [ -e {script}.go ]; do sleep 0.05; done; echo localhost:2\\n")
script.chmod(0o755)
hvlaunch.run(count, (1,), min_np=2, host_discovery_script=str(script))
"""
AFTER = "hvlaunch.run(count, (1,), np=1, quiet=True)"


def executed(notebook: Any) -> None:
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute()


def printed(cell: Any, name: str) -> list[str]:
    text = "".join(
        one["text"] for one in cell.outputs if one["output_type"] == "stream" and one["name"] == name
    )
    return text.splitlines()


def bars(messages: list[Any]) -> list[str]:
    """What was displayed, and in its place."""
    kinds = ("display_data", "update_display_data")
    return [one["content"]["data"]["text/html"] for one in messages if one["msg_type"] in kinds]


def value(cell: Any) -> str:
    [found] = [one["data"]["text/plain"] for one in cell.outputs if one["output_type"] == "execute_result"]
    return str(found)


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(LIGHT))
    notebook = nbformat.read(EXAMPLE, as_version=4)
    executed(notebook)
    training, check = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    for rank in range(2):
        mine = [line for line in printed(training, "stdout") if line.startswith(f"[{rank}]<stdout>: ")]
        assert [line.split()[2] for line in mine] == ["0", "10", "20", "30", "40"]
    assert float(value(check)) > 0.9


def test_output_errors_and_an_interrupt(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in (LINES, WRONG, ENDLESS % str(tmp_path), AFTER)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", allow_errors=True)
    workers: list[psutil.Process] = []

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both workers wait", LIMIT)
        workers.extend(psutil.Process(int(path.name)) for path in tmp_path.iterdir())
        manager: Any = client.km
        os.kill(manager.provisioner.pid, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    client.execute()
    lines, wrong, endless, after = cells
    for rank in range(2):
        mine = [line for line in printed(lines, "stdout") if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}]<stdout>: line {number}" for number in range(3000)]
    assert value(lines) == "[('0', 3000), ('1', 3000)]"
    assert wrong.outputs[-1]["ename"] == "WorkerFailed"
    assert wrong.outputs[-1]["evalue"].startswith("rank 0 on localhost: ZeroDivisionError")
    assert endless.outputs[-1]["ename"] == "KeyboardInterrupt"
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    assert value(after) == "[('0', 1)]"


def test_bar_is_shown_while_hosts_are_connecting(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in (LINES, SLOW % str(tmp_path / "discover"))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(notebook, timeout=LIMIT, kernel_name="python3")
    messages: list[Any] = []
    process: Any = client.process_message

    def seen(message: Any, cell: Any, index: int) -> Any:
        messages.append(message)
        if bars([message]):
            (tmp_path / "discover.go").touch()
        return process(message, cell, index)

    vars(client)["process_message"] = seen
    client.execute()
    shown = bars(messages)
    assert shown[0] == "<progress></progress> waiting for the first hosts of the pool"
    assert shown[-1] == ""
    assert "waiting" not in "".join(printed(cells[1], "stderr"))
    assert value(cells[1]) == "[('0', 1), ('1', 1)]"


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
