"""Lines that a killed driver has not shown are kept: beginnings of lines, and lines that wait to be merged."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvlaunch.console.notes import UnfinishedLines
from hvlaunch.console.output_store import OutputStore
from hvlaunch.console.printer import Printer
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
    console.printer.end_stream(1, "stdout", console.done.append)
    console.shown(0, b"whole\n")
    assert UnfinishedLines(path).read() == {}
    console.close()


def test_earlier_unfinished_lines_are_noted_but_no_bars(path: Path) -> None:
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


def test_with_a_store_no_notes_are_written(path: Path, tmp_path: Path) -> None:
    console = Shown()
    console.printer.keep_unfinished(UnfinishedLines(path))
    console.shown(0, b"beg")
    assert path.exists()
    console.printer.keep_output(lambda: OutputStore(tmp_path))
    console.shown(0, b"in")
    assert not path.exists()
    console.close()


def test_an_incomplete_note_does_not_count(path: Path) -> None:
    lines = UnfinishedLines(path)
    lines.note((0, "stdout"), b"one")
    lines.note((0, "stderr"), b"two")
    lines.note((1, "stderr"), b"x" * (1 << 17))
    with path.open("r+b") as file:
        file.seek(9)
        file.write(b"?")
    assert lines.read() == {(0, "stderr"): b"two"}


def test_a_line_that_grows_and_shrinks(path: Path) -> None:
    """Short ones are written to shared memory, long ones are not; each is whole for who reads."""
    lines = UnfinishedLines(path)
    for size in (1, 3, 2, 60_000, 4000, 5, 5000, 1, 0, 7):
        text = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        for rank in (0, 300):
            lines.note((rank, "stderr"), text)
        expected = {(0, "stderr"): text, (300, "stderr"): text} if text else {}
        assert UnfinishedLines(path).read() == expected


FULL = """
import resource, sys
from pathlib import Path
from hvlaunch.console.notes import UnfinishedLines
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))
lines = UnfinishedLines(Path(sys.argv[1]))
for text in (b"a", b"ab"):
    for rank in range(4):
        lines.note((rank, "stdout"), text)
print(sorted(lines.read().items()))
"""


def test_without_room_for_all_some_notes_are_kept(path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run
    assert run.stdout == "[((0, 'stdout'), b'ab'), ((1, 'stdout'), b'ab')]\n"


def test_lines_that_wait_to_be_merged_are_not_done_with() -> None:
    now = [0.0]
    console = Console(options=ConsoleOptions(merge=True, prefix=""), clock=lambda: now[0])
    console.printer.learn_places({0: ("a", 0), 1: ("a", 1)})
    console.output(0, b"hello\n")
    for _ in range(2):  # what is done with is told when all that came together is written
        is_shown = threading.Event()
        console.printer.in_turn(is_shown.set)
        assert is_shown.wait(WAIT)
    assert console.done == []
    console.output(1, b"hello\n")
    assert console.close()[0] == b"hello\n"
    assert console.done == [6, 6]
