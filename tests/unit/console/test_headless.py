"""A printer without a terminal: what comes is kept, and done when it is."""

import io
import os

from hvlaunch.console.output_store import OutputStore, items, segment_path
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import Status
from hvlaunch.job import ConsoleOptions
from tests.unit.console.consoles import WAIT, Console


def kept(directory):
    file = os.open(segment_path(directory, 1), os.O_RDONLY)
    found = [(item.kind, item.rank, item.data) for item, _ in items(file)][1:]
    os.close(file)
    return found


def test_output_is_stored_before_it_is_acknowledged(tmp_path):
    printer = Printer(None, None, store=OutputStore(tmp_path), options=ConsoleOptions(ranks=()))
    done = []
    printer.learn_places({0: ("a", 0)})
    printer.status(lambda: Status("nobody reads it"))
    printer.output(0, "stdout", b"half", lambda _: done.append(kept(tmp_path)[-1]), ("a", 1))
    printer.end_stream(0, "stdout", lambda _: done.append(kept(tmp_path)[-1]), ("a", 2))
    printer.say("hello")
    printer.show("report\n")
    assert printer.close(WAIT, lambda has_lost: f"lost: {has_lost}")
    assert done in (
        [("stdout", 0, b"half"), ("stdout ended", 0, b"")],
        [("shown", None, b"report\n")] * 2,
        [("stdout ended", 0, b"")] * 2,
        [("said", None, b"hello")] * 2,
    )
    assert kept(tmp_path) == [
        ("placed", None, b'{"0": ["a", 0]}'),
        ("stdout", 0, b"half"),
        ("stdout ended", 0, b""),
        ("said", None, b"hello"),
        ("shown", None, b"report\n"),
        ("said", None, b"lost: False"),
    ]


def test_a_successor_continues_the_tail(tmp_path):
    store = OutputStore(tmp_path)
    store.output(3, "stderr", b"Traceback\n")
    store.write()
    store.close()
    printer = Printer(None, None, store=OutputStore(tmp_path))
    printer.output(3, "stderr", b"ValueError\n", lambda _: None)
    assert printer.tail(3) == b"Traceback\nValueError\n"
    printer.close(WAIT)


def test_a_headless_printer_stores_the_newest_output_and_writes_no_more(tmp_path):
    console = Console()
    console.output(0, b"before\n")
    console.printer.say("a message")
    console.printer.keep_output(lambda: OutputStore(tmp_path))
    console.printer.keep_output(lambda: OutputStore(tmp_path / "there is none"))
    console.output(0, b"both\n")
    console.printer.go_headless()
    assert console.done == [7, 5]
    console.output(0, b"after\n")
    console.printer.end_stream(0, "stdout", console.done.append)
    assert console.close() == (b"[0]<stdout>: before\n[0]<stdout>: both\n", b"hvlaunch: a message\n")
    assert console.done == [7, 5, 6, 0]
    assert [data for _, _, data in kept(tmp_path)] == [
        b"{}",
        b"before\n",
        b"a message",
        b"both\n",
        b"after\n",
        b"",
    ]


def test_a_blocked_reader_does_not_prevent_going_headless(tmp_path):
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb", buffering=0) as pipe:
        console = Console(pipe, io.BytesIO())
        console.printer.keep_output(lambda: OutputStore(tmp_path))
        console.output(0, b"x" * 3_000_000 + b"\n")
        console.printer.go_headless()
        assert console.done == [3_000_001]
        assert console.printer.close(WAIT)
    os.close(read_end)
    assert len(kept(tmp_path)[-1][2]) == 3_000_001


def test_a_full_disk_is_reported_once_and_the_job_continues(tmp_path, monkeypatch):
    console = Console(store=OutputStore(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        console.output(0, b"line\n")
    stdout, stderr = console.close()
    assert stdout == b"[0]<stdout>: line\n" * 3
    assert stderr.count(b"some output is not kept") == 1
    assert console.done == [5, 5, 5]
    assert console.printer.has_lost
