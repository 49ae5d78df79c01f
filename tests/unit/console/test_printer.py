"""The printer: the order of output and messages, the tails that it keeps, and an outlet whose reader takes nothing for a while."""

import fcntl
import io
import os
import threading
from collections import defaultdict

import pytest

from hvlaunch.console.display import Display
from hvlaunch.console.files import OutputFiles
from hvlaunch.console.lines import Prefix
from hvlaunch.console.printer import BATCH, TAIL, Outlet, Output, Printer
from hvlaunch.console.raw_file import RawFile
from hvlaunch.console.status import Status
from hvlaunch.job import ConsoleOptions
from tests.full_pipe import full_pipe
from tests.unit.console.consoles import WAIT, Console


def test_each_line_has_its_workers_prefix():
    console = Console()
    console.output(3, b"loss 0.5\nloss 0.4\n")
    console.output(12, b"warning\n", "stderr")
    assert console.close() == (b"[3]<stdout>: loss 0.5\n[3]<stdout>: loss 0.4\n", b"[12]<stderr>: warning\n")
    assert console.done == [18, 8]


def test_another_prefix():
    console = Console(options=ConsoleOptions(prefix="{stream}-{rank} {host}/{local_rank}|"))
    console.printer.learn_places({9: ("gpu01", 1)})
    console.output(9, b"a\nb\n")
    assert console.close()[0] == b"stdout-9 gpu01/1|a\nstdout-9 gpu01/1|b\n"


def test_lines_are_printed_whole_however_they_come():
    console = Console()
    for byte in b"one\ntwo\n":
        console.output(0, bytes([byte]))
        console.output(1, b"x")
    assert console.close()[0] == b"[0]<stdout>: one\n[0]<stdout>: two\n[1]<stdout>: xxxxxxxx\n"
    assert console.done == [1] * 16


def test_the_end_of_a_stream_prints_its_unfinished_line():
    console = Console()
    console.output(0, b"bye")
    console.printer.end_stream(0, "stdout")
    console.printer.end_stream(1, "stdout")
    console.output(0, b"again\n")
    assert console.close()[0] == b"[0]<stdout>: bye\n[0]<stdout>: again\n"


def test_close_prints_all_that_is_left_in_order_of_ranks():
    console = Console()
    for rank in (2, 0, 1):
        console.output(rank, b"whole\nhalf")
    shown = b"".join(b"[%d]<stdout>: whole\n" % rank for rank in (2, 0, 1))
    assert console.close()[0] == shown + b"".join(b"[%d]<stdout>: half\n" % rank for rank in (0, 1, 2))
    assert console.printer.close()


def test_messages():
    console = Console()
    console.output(0, b"half a line", "stderr")
    console.printer.say("host b: ready\nhost c: ready")
    console.printer.show("the report\n  as it is\n")
    console.printer.show("")
    console.printer.say("a path: \udcff")
    assert console.close()[1] == (
        b"hvlaunch: host b: ready\nhvlaunch: host c: ready\nthe report\n  as it is\nhvlaunch: a path: \\udcff\n"
        b"[0]<stderr>: half a line\n"
    )


def test_the_two_streams_of_one_terminal_do_not_mix_their_lines():
    terminal = io.BytesIO()
    console = Console(terminal, terminal)
    long = b"x" * (1 << 20)
    console.output(0, long)
    console.printer.say("message")
    console.output(0, b"rest\n")
    console.output(1, b"error\n", "stderr")
    assert console.close()[0] == (
        b"[0]<stdout>: " + long + b"\nhvlaunch: message\n[0]<stdout>: rest\n[1]<stderr>: error\n"
    )


def test_a_long_line_in_one_file_is_not_cut_by_messages_in_another():
    console = Console()
    long = b"x" * (1 << 20)
    console.output(0, long)
    console.printer.say("message")
    console.output(0, b"rest\n")
    assert console.close() == (b"[0]<stdout>: " + long + b"rest\n", b"hvlaunch: message\n")


def test_many_ranks_from_many_threads_keep_their_lines_whole_and_in_order():
    console = Console()
    ranks, lines = 16, 200

    def work(rank):
        text = b"".join(b"rank %d line %d\n" % (rank, number) for number in range(lines))
        step = 7 + rank
        for at in range(0, len(text), step):
            console.output(rank, text[at : at + step], "stdout" if rank % 2 else "stderr")

    threads = [threading.Thread(target=work, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shown = b"".join(console.close()).decode().splitlines()
    by_rank = defaultdict(list)
    for line in shown:
        prefix, _, text = line.partition(": ")
        by_rank[prefix].append(text)
    assert by_rank == {
        f"[{rank}]<{'stdout' if rank % 2 else 'stderr'}>": [
            f"rank {rank} line {number}" for number in range(lines)
        ]
        for rank in range(ranks)
    }


def test_files_get_the_raw_bytes_before_done(tmp_path):
    console = Console()
    console.printer.keep(OutputFiles(tmp_path, 2))
    seen = []
    path = tmp_path / "rank.1" / "stderr"
    console.printer.output(1, "stderr", b"half\r\xff", lambda _: seen.append(path.read_bytes()))
    console.close()
    assert seen == [b"half\r\xff"]
    assert path.read_bytes() == b"half\r\xff"


def test_a_failing_file_is_reported_once_and_the_console_continues(tmp_path):
    console = Console()
    console.printer.keep(OutputFiles(tmp_path, 1))
    path = tmp_path / "rank.0" / "stdout"
    path.unlink()
    path.mkdir()
    console.output(0, b"one\n")
    console.output(0, b"two\n")
    stdout, stderr = console.close()
    assert stdout == b"[0]<stdout>: one\n[0]<stdout>: two\n"
    assert stderr == (
        f"hvlaunch: {path}: is a directory; the files of --output-filename are not complete\n".encode()
    )


def test_tails():
    console = Console()
    console.output(0, b"not this\n")
    for number in range(3000):
        console.output(0, b"%d\n" % number, "stderr")
    console.output(1, b"x" * 3 * TAIL + b"end", "stderr")
    whole = b"".join(b"%d\n" % number for number in range(3000))
    assert console.printer.tail(0) == whole[-TAIL:]
    assert console.printer.tail(1) == (b"x" * TAIL + b"end")[-TAIL:]
    assert console.printer.tail(2) == b""
    console.close()


def test_the_next_worker_of_a_rank_begins_a_new_tail():
    console = Console()
    console.output(0, b"old\n", "stderr")
    console.printer.end_stream(0, "stderr")
    assert console.printer.tail(0) == b"old\n"
    console.output(0, b"new\n", "stderr")
    console.output(0, b"more\n", "stderr")
    assert console.printer.tail(0) == b"new\nmore\n"
    console.close()


def test_a_terminal_shows_both_streams_in_the_order_they_came():
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "wb", buffering=0) as terminal, os.fdopen(ours, "rb", buffering=0) as screen:
        printer = Printer(terminal, terminal, environ={"TERM": "dumb"})
        for number in range(5):
            printer.output(0, "stdout", b"out %d\n" % number, lambda _: None)
            printer.output(0, "stderr", b"err %d\n" % number, lambda _: None)
        assert printer.close(WAIT)
        expected = b"".join(b"[0]<stdout>: out %d\r\n[0]<stderr>: err %d\r\n" % (n, n) for n in range(5))
        shown = b""
        while len(shown) < len(expected):
            shown += screen.read(4096)
    assert shown == expected


def test_hidden_ranks_are_in_files_and_tails(tmp_path):
    console = Console(options=ConsoleOptions(ranks=(range(1), range(8, 16))))
    console.printer.keep(OutputFiles(tmp_path, 16))
    for rank in range(16):
        console.output(rank, b"out %d\n" % rank)
        console.output(rank, b"err %d" % rank, "stderr")
        console.printer.end_stream(rank, "stderr")
    stdout, stderr = console.close()
    shown = [0, *range(8, 16)]
    assert stdout == b"".join(b"[%d]<stdout>: out %d\n" % (rank, rank) for rank in shown)
    assert stderr == b"".join(b"[%d]<stderr>: err %d\n" % (rank, rank) for rank in shown)
    assert len(console.done) == 32
    for rank in range(16):
        assert (tmp_path / f"rank.{rank:02}" / "stdout").read_bytes() == b"out %d\n" % rank
        assert console.printer.tail(rank) == b"err %d" % rank


def test_a_hidden_stream_is_in_files_and_tails(tmp_path):
    console = Console(options=ConsoleOptions(hidden=("stdout",)))
    console.printer.keep(OutputFiles(tmp_path, 1))
    console.output(0, b"out\n")
    console.output(0, b"err\n", "stderr")
    console.printer.end_stream(0, "stdout")
    assert console.close() == (b"", b"[0]<stderr>: err\n")
    assert len(console.done) == 2
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"out\n"
    assert console.printer.tail(0) == b"err\n"


def test_hidden_ranks_are_not_waited_for_when_lines_are_merged():
    still = Console(options=ConsoleOptions(ranks=(range(2),), merge=True), clock=lambda: 0.0)
    still.printer.learn_places({rank: ("a", rank) for rank in range(4)})
    arrived = threading.Event()
    for rank in range(2):
        still.printer.output(rank, "stdout", b"line\n", lambda _: arrived.set())
    assert arrived.wait(WAIT)
    still.output(3, b"line\n")
    assert still.close()[0] == b"[0-1]<stdout>: line\n"


def test_merged_lines_come_by_themselves(pipe):
    read, write = pipe
    printer = Printer(write, io.BytesIO(), options=ConsoleOptions(merge=True))
    printer.learn_places({0: ("a", 0), 1: ("a", 1)})
    printer.output(0, "stdout", b"only mine\n", lambda _: None)
    assert read.readline() == b"[0]<stdout>: only mine\n"
    assert printer.close(WAIT)


def test_a_stalled_bar_is_printed_after_its_interval(pipe):
    read, write = pipe
    printer = Printer(write, io.BytesIO())
    printer.output(0, "stdout", b"\r10%\r20%", lambda _: None)
    assert read.readline() == b"[0]<stdout>: 20%\n"
    assert printer.close(WAIT)


def read_until(screen, terminal, shown):
    while terminal.shown != shown:
        data = screen.read(4096)
        assert data, terminal.shown
        terminal.feed(data)


def test_bars_and_status_on_a_terminal(terminal):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "wb", buffering=0) as tty, os.fdopen(ours, "rb", buffering=0) as screen:
        printer = Printer(tty, tty, environ={"TERM": "xterm"})
        printer.status(lambda: Status("connecting 0/1: waiting for b"))
        read_until(screen, terminal, "hvlaunch: connecting 0/1: waiting for b")
        printer.output(0, "stderr", b"\r 10%", lambda _: None)
        read_until(screen, terminal, "[0]<stderr>:  10%\nhvlaunch: connecting 0/1: waiting for b")
        printer.status(None)
        printer.output(1, "stdout", b"hello\n", lambda _: None)
        read_until(screen, terminal, "[1]<stdout>: hello\n[0]<stderr>:  10%")
        printer.output(0, "stderr", b"\r100%\n", lambda _: None)
        assert printer.close(WAIT)
        read_until(screen, terminal, "[1]<stdout>: hello\n[0]<stderr>: 100%")


@pytest.mark.parametrize("merge", [False, True])
def test_a_line_of_50_mb_passes_whole(merge):
    console = Console(options=ConsoleOptions(merge=merge))
    line = os.urandom(1 << 20).replace(b"\n", b" ").replace(b"\r", b" ") * 50
    for at in range(0, len(line), 65536):
        console.output(0, line[at : at + 65536])
    console.output(0, b"\nnext\n")
    stdout, _ = console.close()
    assert stdout == b"[0]<stdout>: " + line + b"\n[0]<stdout>: next\n"
    assert sum(console.done) == len(line) + 6


def test_redirected_stdout_makes_both_streams_plain(pipe):
    read, write = pipe
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "wb", buffering=0) as tty, os.fdopen(ours, "rb", buffering=0) as screen:
        printer = Printer(write, tty, environ={"TERM": "xterm"})
        printer.output(0, "stdout", b"out\n", lambda _: None)
        assert read.readline() == b"[0]<stdout>: out\n", "no colours in a pipe"
        printer.output(0, "stderr", b"err\n", lambda _: None)
        shown = b""
        while b"err\r\n" not in shown:
            shown += screen.read(100)
        assert b"\x1b[0;36m[0]<stderr>: \x1b[0merr" in shown
        assert printer.close(WAIT)


def test_colours_can_be_asked_for_in_a_pipe_too():
    console = Console(options=ConsoleOptions(color="always"))
    console.output(0, b"out\n")
    console.printer.say("message")
    stdout, stderr = console.close()
    assert stdout == b"\x1b[0;36m[0]<stdout>: \x1b[0mout\n"
    assert stderr == b"\x1b[0;1mhvlaunch: \x1b[0mmessage\n"


LINES = b"x" * 99 + b"\n"
SOME = LINES * 500
MANY = 40 * BATCH // len(SOME)


class Counting(Display):
    """Counts the bytes of output that it was given."""

    given = 0

    def output(self, key, data, now):
        self.given += len(data)
        super().output(key, data, now)


def outlet_of(write):
    file = RawFile(write, "stdout")
    display = Counting(
        {"stdout": file, "stderr": file}, Prefix("{rank} {host}: "), color=False, live_rows=0, merge=False
    )
    return Outlet(display, lambda _, error: None)


def read_all(read, outlet, done):
    """All that the outlet writes until `done` has every output; the most that the display was given beyond."""
    text, most = b"", 0
    while len(done) < MANY:
        text += read.read1(1 << 16)
        outlet.write(0.0)
        most = max(most, outlet.display.given - sum(done))
    return text, most


def test_untaken_output_waits_raw_and_the_display_makes_one_page(pipe):
    read, write = pipe
    outlet = outlet_of(write)
    done: list[int] = []
    for _ in range(MANY):
        outlet.put(Output(0, "stdout", SOME, done.append))
    outlet.write(0.0)
    assert sum(done) <= fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert outlet.waits_at is not None
    _, most = read_all(read, outlet, done)
    assert done == [len(SOME)] * MANY
    assert BATCH <= most < BATCH + len(SOME)


def test_calls_for_the_display_keep_their_order(pipe):
    """Output of a rank that waits has the host from which it came, though the rank has another since."""
    read, write = pipe
    outlet = outlet_of(write)
    done: list[int] = []
    for number in range(MANY):
        place = {0: (f"host{number % 2}", 0)}
        outlet.put(lambda _, place=place: outlet.display.learn_places(place))
        outlet.put(Output(0, "stdout", SOME, done.append))
        outlet.write(0.0)
    text, _ = read_all(read, outlet, done)
    outlet.write(0.0)
    lines = text.splitlines()
    assert len(lines) >= 1000
    assert lines[:1000:500] == [b"0 host0: " + LINES[:-1], b"0 host1: " + LINES[:-1]]
    assert lines[499][:9] == b"0 host0: "
    hosts = [line[2:7] for line in lines[:-1]]
    assert hosts == [b"host%d" % (number // 500 % 2) for number in range(len(hosts))]


def test_output_is_on_record_just_before_it_is_written(pipe):
    """The register outlives this process: who is killed has printed what it says, unless in that very moment."""
    read, write = pipe
    outlet = outlet_of(write)
    register: list[int] = []
    done: list[int] = []

    def note(number):
        def told(is_printed):
            if is_printed:
                register.append(number)
            else:
                assert register.pop() == number

        return told

    real = outlet._write_to

    def write_to(file, parts):
        assert register[-1] == len(done) + sum(len(outputs) for _, outputs in outlet._owed) - 1
        return real(file, parts)

    outlet._write_to = write_to
    for number in range(MANY):
        outlet.put(Output(0, "stdout", SOME, done.append, note=note(number)))
    outlet.write(0.0)
    assert outlet.waits_at is not None
    assert register == list(range(len(done)))
    read_all(read, outlet, done)
    assert register == list(range(MANY))


def test_untaken_output_is_not_recorded_again_for_each_item():
    """A driver killed at that moment would lose the output."""
    reader, writer = full_pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as write:
        outlet = outlet_of(write)
        told: list[bool] = []
        outlet.put(Output(0, "stdout", LINES, lambda _: None, note=told.append))
        outlet.write(0.0)
        before = [*told]
        for _ in range(3):
            outlet.put(Output(0, "stdout", LINES, lambda _: None, note=told.append))
            outlet.write(0.0)
        assert told == before
        assert before[-1:] == [False]
        os.read(reader, 1 << 20)
        outlet.write(0.0)
        assert told[-1]
