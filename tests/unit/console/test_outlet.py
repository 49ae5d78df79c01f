"""An outlet whose reader takes nothing for a while."""

import fcntl
import os

from hvlaunch.console.display import Display
from hvlaunch.console.outlet import BATCH, Outlet, Output
from hvlaunch.console.prefix import Prefix
from hvlaunch.console.raw_file import RawFile
from tests.full_pipe import full_pipe

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
