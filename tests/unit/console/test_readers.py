"""The printer's readers: who is slow, who takes nothing, who is gone, and what can't be written."""

import errno
import io
import os
import select
import subprocess
import sys
import threading

from hvlaunch.console.files import OutputFiles
from hvlaunch.console.printer import Printer
from tests.unit.console.consoles import WAIT, Console, Failing, Gate, Told


def test_done_is_called_after_the_bytes_were_written():
    gate = Gate()
    console = Console(stdout=gate)
    console.output(0, b"one\n")
    assert gate.entered.wait(WAIT)
    console.output(0, b"two\n")
    assert console.done == []
    gate.open.set()
    console.close()
    assert console.done == [4, 4]


def test_waiting_output_is_written_together():
    gate = Gate()
    console = Console(stdout=gate)
    console.output(0, b"first\n")
    assert gate.entered.wait(WAIT)
    for rank in range(100):
        console.output(rank, b"later\n")
    gate.open.set()
    console.close()
    assert len(gate.writes) == 2


def test_a_slow_reader_holds_done_back(pipe):
    read, write = pipe
    acknowledged = threading.Event()
    printer = Printer(write, io.BytesIO())
    line = b"x" * 99 + b"\n"
    text = line * 30_000  # more than a pipe takes
    printer.output(0, "stdout", text, lambda _: acknowledged.set())
    start = read.read(1000)
    assert not acknowledged.is_set()
    rest = read.read(30_000 * len(b"[0]<stdout>: " + line) - 1000)
    assert acknowledged.wait(WAIT)
    assert start + rest == (b"[0]<stdout>: " + line) * 30_000
    assert printer.close(WAIT)


def test_close_drops_untaken_output(pipe):
    read, write = pipe
    stderr = io.BytesIO()
    printer = Printer(write, stderr)
    printer.output(0, "stdout", b"x\n" * (1 << 20), lambda _: None)
    assert not printer.close(0.01)
    assert printer.is_whole
    assert printer.has_lost
    assert stderr.getvalue() == b"hvlaunch: stdout: nothing has read it for 0.01 s; some output is lost\n"
    assert len(read.read1(1 << 20)) >= select.PIPE_BUF


def test_messages_and_the_other_stream_pass_a_blocked_reader(pipe):
    _, write = pipe
    said = Told(b"the end of rank 1\n[0]<stderr>: why\n")
    done: list[int] = []
    printer = Printer(write, said)
    printer.output(0, "stdout", b"x\n" * (1 << 20), done.append)
    printer.output(0, "stderr", b"why\n", done.append)
    printer.say("the end of rank 1")
    assert said.event.wait(WAIT)
    assert done == [4]
    assert not printer.close(0.01)
    assert done == [4, 2 << 20]


def test_a_slow_reader_gets_everything(pipe):
    """Only output that no reader has begun to take is dropped at the end."""
    read, write = pipe
    printer = Printer(write, io.BytesIO())
    lines = b"".join(b"%d\n" % number for number in range(50_000))
    printer.output(0, "stdout", lines, lambda _: None)
    got: list[bytes] = []

    def read_on():
        while sum(map(len, got)) < len(lines) + 50_000 * len("[0]<stdout>: "):
            got.append(read.read1(1 << 14))

    reader = threading.Thread(target=read_on)
    reader.start()
    assert printer.close(WAIT)
    reader.join(WAIT)
    assert b"".join(got).replace(b"[0]<stdout>: ", b"") == lines


def test_a_gone_reader_is_reported_once_and_the_rest_continues(pipe, tmp_path):
    read, write = pipe
    read.close()
    broken: list[bool] = []
    done: list[int] = []
    stderr = io.BytesIO()
    printer = Printer(write, stderr, on_broken=lambda: broken.append(True))
    printer.keep(OutputFiles(tmp_path, 1))
    for _ in range(3):
        printer.output(0, "stdout", b"out\n", done.append)
        printer.output(0, "stderr", b"err\n", done.append)
    assert printer.close(WAIT)
    assert broken == [True]
    assert done == [4] * 6
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"out\n" * 3
    assert stderr.getvalue() == b"[0]<stderr>: err\n" * 3
    assert printer.tail(0) == b"err\n" * 3


def test_both_readers_gone_are_told_of_once():
    broken = []
    console = Console(Failing(errno.EPIPE), Failing(errno.EPIPE), on_broken=lambda: broken.append(True))
    console.output(0, b"out\n")
    console.output(0, b"err\n", "stderr")
    console.close()
    assert broken == [True]
    assert console.done == [4, 4]


def test_a_gone_reader_without_anyone_to_tell():
    console = Console(Failing(errno.EPIPE))
    console.output(0, b"out\n")
    console.close()
    assert console.done == [4]


def test_another_write_error_is_said_once_and_writing_goes_on():
    full = Failing(errno.ENOSPC)
    acknowledged = threading.Semaphore(0)
    console = Console(full)
    for _ in range(3):
        console.printer.output(0, "stdout", b"out\n", lambda _: acknowledged.release())
        assert acknowledged.acquire(timeout=WAIT)
    _, stderr = console.close()
    assert stderr == b"hvlaunch: stdout: no space left on device; some output is lost\n"
    assert full.tries == 3


def test_a_failing_stderr_harms_nothing():
    console = Console(stderr=Failing(errno.EIO))
    console.output(0, b"err\n", "stderr")
    console.output(0, b"out\n")
    assert console.close()[0] == b"[0]<stdout>: out\n"
    assert console.done == [4, 4]


def test_the_tail_does_not_wait_for_printing():
    gate = Gate()
    console = Console(stderr=gate)
    console.output(0, b"why\n", "stderr")
    assert console.printer.tail(0) == b"why\n"
    gate.open.set()
    console.close()


def test_a_failure_to_write_leaves_no_trace_at_the_end_of_the_interpreter():
    script = (
        "import sys\n"
        "from hvlaunch.console.printer import Printer\n"
        "printer = Printer(sys.stdout.buffer, sys.stderr.buffer)\n"
        "for _ in range(5):\n"
        "    printer.output(0, 'stdout', b'x' * 1000 + b'\\n', lambda _: None)\n"
        "printer.close()\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_last_message_follows_all_output():
    lost, kept = Console(stdout=Failing(errno.ENOSPC)), Console()
    for console in (lost, kept):
        console.output(0, b"words\n")
        console.printer.close(WAIT, lambda has_lost: f"the end, {has_lost}")
    assert lost.stderr.getvalue().splitlines()[-1] == b"hvlaunch: the end, True"
    assert kept.stderr.getvalue() == b"hvlaunch: the end, False\n"


def test_patience_is_spent_once_also_for_the_last_message(pipe):
    _, write = pipe
    printer = Printer(io.BytesIO(), write)
    printer.output(0, "stderr", b"x\n" * (1 << 20), lambda _: None)
    assert not printer.close(0.01, lambda has_lost: f"the end, {has_lost}")
    assert printer.is_whole
