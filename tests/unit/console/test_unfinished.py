"""What is shown nowhere when its driver is killed is kept: how a line begins, and lines that wait to be merged."""

import threading
from pathlib import Path

import pytest

from hvlaunch.console.output_store import OutputStore
from hvlaunch.console.printer import Printer
from hvlaunch.console.unfinished import UnfinishedLines
from hvlaunch.job import ConsoleOptions
from tests.unit.console.consoles import WAIT, Console
from tests.unit.console.test_headless import kept


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "unfinished"


class Shown(Console):
    """A console that waits until what it was given is done with."""

    def shown(self, rank: int, data: bytes) -> None:
        done = threading.Event()
        self.printer.output(rank, "stdout", data, lambda _: done.set())
        assert done.wait(WAIT)


def test_how_a_line_begins_is_noted_when_its_frame_is_done_with(path: Path) -> None:
    console = Shown()
    console.printer.keep_unfinished(UnfinishedLines(path))
    console.shown(0, b"whole\n")
    assert not path.exists()
    console.shown(3, b"whole\nbeg")
    console.shown(1, b"loss")
    assert UnfinishedLines(path).read() == {(1, "stdout"): b"loss", (3, "stdout"): b"beg"}
    console.shown(3, b"inning\n")
    console.shown(1, b" is 0.5")
    assert UnfinishedLines(path).read() == {(1, "stdout"): b"loss is 0.5"}
    console.printer.end(1, "stdout", console.done.append)
    console.shown(0, b"whole\n")
    assert UnfinishedLines(path).read() == {}
    console.close()


def test_what_was_begun_before_is_noted_too_and_a_bars_state_is_not(path: Path) -> None:
    console = Shown()
    console.shown(0, b"beg")
    console.printer.keep_unfinished(UnfinishedLines(path))
    console.shown(1, b"10%\r20%")
    assert UnfinishedLines(path).read() == {(0, "stdout"): b"beg"}
    console.close()


def test_another_driver_keeps_it_before_the_rest(path: Path, tmp_path: Path) -> None:
    UnfinishedLines(path).note((1, "stdout"), b"loss")
    printer = Printer(None, None, store=OutputStore(tmp_path), options=ConsoleOptions(ranks=()))
    lines = UnfinishedLines(path)
    stored = threading.Event()

    def done(_: int) -> None:
        lines.forget()
        stored.set()

    printer.begun(lines.read(), done)
    printer.output(1, "stdout", b" is 0.5\n", lambda _: None)
    assert stored.wait(WAIT)
    assert printer.close(WAIT)
    assert kept(tmp_path)[:2] == [("stdout", 1, b"loss"), ("stdout", 1, b" is 0.5\n")]
    assert not path.exists()


def test_who_has_all_in_a_store_notes_nothing(path: Path, tmp_path: Path) -> None:
    console = Shown()
    console.printer.keep_unfinished(UnfinishedLines(path))
    console.shown(0, b"beg")
    assert path.exists()
    console.printer.keep_output(lambda: OutputStore(tmp_path))
    console.shown(0, b"in")
    assert not path.exists()
    console.close()


def test_a_note_that_is_not_whole_is_none(path: Path) -> None:
    lines = UnfinishedLines(path)
    lines.note((0, "stdout"), b"one")
    lines.note((0, "stderr"), b"two")
    lines.note((1, "stderr"), b"x" * (1 << 17))
    with path.open("r+b") as file:
        file.seek(9)
        file.write(b"?")
    assert lines.read() == {(0, "stderr"): b"two"}


def test_lines_that_wait_to_be_merged_are_not_done_with() -> None:
    now = [0.0]
    console = Console(options=ConsoleOptions(merge=True, prefix=""), clock=lambda: now[0])
    console.printer.place({0: ("a", 0), 1: ("a", 1)})
    console.output(0, b"hello\n")
    for _ in range(2):  # what is done with is told when all that came together is written
        is_shown = threading.Event()
        console.printer.in_turn(is_shown.set)
        assert is_shown.wait(WAIT)
    assert console.done == []
    console.output(1, b"hello\n")
    assert console.close()[0] == b"hello\n"
    assert console.done == [6, 6]
