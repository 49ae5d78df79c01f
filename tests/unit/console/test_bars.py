"""Progress bars: what of them becomes lines, and what a terminal shows meanwhile."""

from itertools import pairwise

import pytest

from hvlaunch.console.bars import INTERVAL, Bars
from hvlaunch.console.lines import Key, LineSplitter

RATE = 0.05
ONE: Key = (0, "stdout")
OTHER: Key = (1, "stdout")
THIRD: Key = (2, "stdout")


class Stream:
    """One stream through splitter and bars, on a clock of its own."""

    def __init__(self, *, live=False):
        self.bars = Bars(live=live)
        self.splitter = LineSplitter()
        self.now = 0.0
        self.printed = []

    def write(self, data, pause=RATE):
        text = self.splitter.feed(data)
        if self.splitter.has_states or ONE in self.bars:
            text = self.bars.feed(ONE, text, self.splitter.state, self.now)
        self.keep(text)
        self.wait(pause)

    def wait(self, seconds):
        end = self.now + seconds
        while self.bars.deadline is not None and self.bars.deadline <= end:
            self.now = self.bars.deadline
            for _, line in self.bars.due(self.now):
                self.keep(line)
        self.now = end

    def end(self):
        self.keep(self.bars.feed(ONE, self.splitter.finish(), None, self.now) + self.bars.finish(ONE))
        assert ONE not in self.bars
        return self.printed

    def keep(self, text):
        assert text == b"" or text.endswith(b"\n")
        self.printed += [(round(self.now, 3), line.decode()) for line in text.splitlines()]

    @property
    def lines(self):
        return [line for _, line in self.printed]


STYLES = {
    "tqdm": (b"", b"\r%d%%", b"", b"\n"),
    "print(end='\\r')": (b"", b"%d%%\r", b"", b"\n"),
    "erasing": (b"", b"\r\x1b[K%d%%", b"", b"\n"),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_pipe_gets_some_states_of_a_bar_and_always_the_last(style):
    before, state, after, end = STYLES[style]
    stream = Stream()
    stream.write(before)
    for number in range(101):
        stream.write(state % number + after)
    stream.write(end)
    stream.write(b"done\n")
    lines = [line.replace("\x1b[K", "") for line in stream.lines]
    assert lines[-2:] == ["100%", "done"]
    assert lines.count("100%") == 1
    numbers = [int(line[:-1]) for line in lines[:-1]]
    assert numbers == sorted(numbers)
    times = [time for time, _ in stream.printed]
    assert all(later - earlier >= INTERVAL - 1e-9 for earlier, later in pairwise(times[:-2]))
    assert len(lines) == pytest.approx(101 * RATE / INTERVAL + 2, abs=2)
    assert ONE not in stream.bars


def test_a_quick_bar_is_one_line():
    stream = Stream()
    stream.write(b"".join(b"\r%d%%" % number for number in range(101)) + b"\n")
    assert stream.lines == ["100%"]
    assert stream.bars.deadline is None


def test_a_stalled_bar_shows_its_state():
    stream = Stream()
    stream.write(b"\r10%")
    stream.write(b"\r20%")
    stream.wait(10)
    assert stream.lines == ["20%"]
    assert stream.bars.deadline is None
    stream.write(b"\r30%\n")
    assert stream.lines == ["20%", "30%"]


def test_a_state_is_not_printed_in_halves():
    stream = Stream()
    stream.write(b"\r10% of")
    stream.write(b" all")
    for _ in range(20):
        stream.write(b"\r20")
        stream.write(b"% of all")
    assert set(stream.lines) <= {"10% of all", "20% of all"}


def test_the_end_of_the_stream_is_the_end_of_the_bar():
    for last in (b"\r90%", b"\r90%\r"):
        stream = Stream()
        stream.write(b"\r80%" + last)
        assert stream.end() == [(RATE, "90%")]


def test_a_bar_that_erases_itself_is_printed_nevertheless():
    stream = Stream()
    stream.write(b"\r 99%\r100%\r    \r")
    stream.write(b"done\n")
    stream.wait(10)
    assert stream.lines == ["done", "100%"]
    assert ONE not in stream.bars


def test_lines_written_above_a_bar_are_no_states():
    stream = Stream()
    for number in range(100):
        stream.write(b"\r%d%%" % number)
        stream.write(b"\r   \rstep %d\n" % number)
    steps = [line for line in stream.lines if line.startswith("step")]
    assert steps == [f"step {number}" for number in range(100)]
    assert len(stream.lines) - len(steps) == pytest.approx(200 * RATE / INTERVAL, abs=3)


def test_a_terminal_draws_states_and_prints_permanent_lines():
    stream = Stream(live=True)
    stream.write(b"start\n")
    assert stream.bars.current() == {}
    seen = []
    for data in (b"\r10%", b"\r20%", b"\r30%\r", b"40", b"%\r    \r", b"\r50%", b"\n", b"done\n"):
        stream.write(data)
        seen.append(stream.bars.current().get(ONE))
    assert seen == [b"10%", b"20%", b"30%", b"40", None, b"50%", None, None]
    assert stream.lines == ["start", "50%", "done"]
    assert stream.bars.deadline is None
    assert ONE not in stream.bars


def test_the_last_state_stays_on_the_terminal():
    stream = Stream(live=True)
    stream.write(b"\r10%\r20%")
    assert stream.end() == [(RATE, "20%")]


def test_other_lines_are_left_alone():
    stream = Stream()
    stream.write(b"dos\r\nlines\r\n" + b"x" * 100 + b"\r")
    stream.write(b"\n\n")
    assert stream.lines == ["dos", "lines", "x" * 100, ""]


def test_bars_do_not_disturb_each_other():
    bars = Bars(live=False)
    for owner in (ONE, OTHER):
        bars.feed(owner, b"1\r2\r", None, 0.0)
    assert bars.due(INTERVAL - 0.01) == []
    assert bars.due(INTERVAL) == [(ONE, b"2\n"), (OTHER, b"2\n")]
    assert bars.finish(THIRD) == b""
