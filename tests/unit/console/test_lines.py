"""Lines: their ends, progress bars, prefixes, and a screen of many owners."""

import re
import tracemalloc
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvlaunch.console.lines import (
    ASCTIME,
    INTERVAL,
    LONGEST,
    Bars,
    Key,
    LineSplitter,
    Prefix,
    Screen,
    TracebackFilter,
)
from hvlaunch.errors import BadUsage


def split(chunks):
    splitter = LineSplitter()
    return b"".join([*(splitter.feed(chunk) for chunk in chunks), splitter.finish()])


def one_byte_at_a_time(data):
    """A plain model of the splitter's contract."""
    lines, line, number = [], b"", 0
    while number < len(data):
        byte = data[number : number + 1]
        number += 1
        end = b"\n"
        if byte == b"\r":
            while data[number : number + 1] == b"\r":
                number += 1
            if data[number : number + 1] == b"\n":
                number += 1
            elif not line or number == len(data):
                continue
            else:
                end = b"\r"
        elif byte != b"\n":
            line += byte
            continue
        lines.append(line + end)
        line = b""
    return b"".join([*lines, line + b"\n" if line else b""])


@pytest.mark.parametrize(
    ("data", "printed"),
    [
        (b"", b""),
        (b"one\ntwo\n", b"one\ntwo\n"),
        (b"one\n\n\ntwo\n", b"one\n\n\ntwo\n"),
        (b"no end", b"no end\n"),
        (b"dos\r\nlines\r\n\r\n", b"dos\nlines\n\n"),
        (b"text mode twice\r\r\nnext\n", b"text mode twice\nnext\n"),
        (b"10%\r20%\r30%\n", b"10%\r20%\r30%\n"),
        (b"\r10%\r20%\r30%\ndone\n", b"10%\r20%\r30%\ndone\n"),  # as tqdm has it
        (b"10%\r20%\r", b"10%\r20%\n"),
        (b"\xff\xfe\x00 \xc3\xa9t\xc3\xa9 \xc3\n", b"\xff\xfe\x00 \xc3\xa9t\xc3\xa9 \xc3\n"),
    ],
)
def test_line_ends(data, printed):
    assert split([data]) == printed
    assert split(data[at : at + 1] for at in range(len(data))) == printed


pieces = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc", b"\xc3", b"\xa9", b""]), max_size=30)


@given(pieces, st.data())
@example([b"a\r", b"\n"], None)
@example([b"\n\r", b"\r\n"], None)
def test_any_chunking_gives_the_same_lines(chunks, data):
    whole = b"".join(chunks)
    expected = one_byte_at_a_time(whole)
    assert split([whole]) == expected
    assert split(chunks) == expected
    if data is not None:
        cut = data.draw(st.integers(0, len(whole)))
        assert split([whole[:cut], whole[cut:]]) == expected


@given(st.lists(st.binary(max_size=20).filter(lambda chunk: b"\r" not in chunk), max_size=10))
def test_without_returns_every_byte_passes_unchanged(chunks):
    whole = b"".join(chunks)
    assert split(chunks) == whole + (b"" if whole.endswith(b"\n") or not whole else b"\n")


def test_only_whole_lines_come_out():
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == b"one\n"
    assert splitter.feed(b"") == b""
    assert splitter.feed(b"o\nthr") == b"two\n"
    assert splitter.finish() == b"thr\n"
    assert splitter.finish() == b""


def test_a_return_at_the_end_of_a_chunk_waits_for_the_next():
    splitter = LineSplitter()
    assert splitter.feed(b"50%\r") == b""
    assert splitter.feed(b"\nnext\r") == b"50%\n"
    assert splitter.feed(b"60%") == b"next\r"
    assert splitter.finish() == b"60%\n"


def test_the_state_is_what_a_terminal_would_show():
    splitter = LineSplitter()
    seen = []
    for chunk in (b"plain", b"\n\r", b"10%", b"\r20%", b" of all\r", b"30", b"%\n", b"plain", b"\r", b"\n"):
        text = splitter.feed(chunk)
        seen.append((text, splitter.state, splitter.has_states))
    assert seen == [
        (b"", None, False),
        (b"plain\n", b"", True),
        (b"", b"10%", True),
        (b"10%\r", b"20%", True),
        (b"", b"20% of all", True),
        (b"20% of all\r", b"30", True),
        (b"30%\n", None, False),
        (b"", None, False),
        (b"", b"plain", True),
        (b"plain\n", None, False),
    ]


def test_the_end_of_a_long_line_is_no_state():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * LONGEST) == b"x" * LONGEST
    assert splitter.feed(b"y\rbar\rnext\nz\r") == b"y\nbar\rnext\n"
    assert splitter.feed(b"x" * LONGEST) == b"z\r" + b"x" * LONGEST
    assert splitter.feed(b"\rbar\r.") == b"\nbar\r"


def test_after_its_end_a_stream_begins_anew():
    splitter = LineSplitter()
    assert splitter.feed(b"old\r") + splitter.finish() == b"old\n"
    assert splitter.feed(b"\nnew\n") == b"\nnew\n"


def test_a_long_line_is_passed_on_in_pieces_and_not_kept():
    splitter, passed = LineSplitter(), 0
    chunk = b"x" * 65536
    tracemalloc.start()
    for _ in range(160):
        passed += len(splitter.feed(chunk))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rest = splitter.feed(b"end\nnext\n")
    assert passed == 160 * len(chunk)
    assert rest == b"end\nnext\n"
    assert peak < 4 * LONGEST


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r", b""])
def test_a_long_line_ends_like_any_other(ending):
    assert split([b"x" * LONGEST, ending]) == b"x" * LONGEST + b"\n"


A, B = "a", "b"


def placed(*texts):
    screen = Screen()
    prefixes = {A: b"[a] ", B: b"[b] "}
    return b"".join(part for owner, text in texts for part in screen.arrange(owner, prefixes[owner], text))


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([(A, b"")], b""),
        ([(A, b"1\n2\n\n3\n")], b"[a] 1\n[a] 2\n[a] \n[a] 3\n"),
        ([(A, b"1\n"), (B, b"2\n"), (A, b"3\n")], b"[a] 1\n[b] 2\n[a] 3\n"),
        ([(A, b"1\nlo"), (A, b"ng"), (A, b"er\n2\n")], b"[a] 1\n[a] longer\n[a] 2\n"),
        ([(A, b"lo"), (B, b"x\n"), (A, b"ng\n")], b"[a] lo\n[b] x\n[a] ng\n"),
        ([(A, b"lo"), (B, b""), (A, b"ng\n")], b"[a] long\n"),
        ([(A, b"lo"), (B, b"x\n"), (A, b"\n"), (A, b"\n")], b"[a] lo\n[b] x\n[a] \n"),
        ([(A, b"lo"), (B, b"in"), (A, b"ng"), (B, b"g\n")], b"[a] lo\n[b] in\n[a] ng\n[b] g\n"),
    ],
)
def test_lines_of_several_owners_on_one_screen(texts, shown):
    assert placed(*texts) == shown


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.sampled_from([b"1\n", b"2", b"3\n4", b"\n", b"", b"5\n6\n"]))
    )
)
def test_each_line_on_a_screen_has_one_owner_and_none_is_lost(texts):
    lines = placed(*texts).split(b"\n")
    assert all(line[:4] in (b"[a] ", b"[b] ") for line in lines if line)
    for owner, prefix in ((A, b"[a] "), (B, b"[b] ")):
        written = b"".join(text for who, text in texts if who == owner).replace(b"\n", b"")
        assert b"".join(line[4:] for line in lines if line.startswith(prefix)) == written


CHAINED = b"""\
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    loss.backward()
RuntimeError: Connection closed by peer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 3, in <module>
KeyboardInterrupt
"""


def test_tracebacks_are_removed_from_each_stream_and_counted():
    tracebacks = TracebackFilter()
    assert tracebacks.feed((0, "stderr"), b"before\n" + CHAINED + b"after\n  indented\n") == (
        b"before\nafter\n  indented\n"
    )
    first, second = CHAINED[:60], CHAINED[60:]
    cut = first.rindex(b"\n") + 1
    assert tracebacks.feed((1, "stderr"), first[:cut]) == b""
    assert tracebacks.feed((2, "stderr"), b"fine\n\n") == b"fine\n\n"
    assert tracebacks.feed((1, "stderr"), first[cut:] + second) == b""
    assert tracebacks.feed((3, "stderr"), re.sub(rb"(?m)^", b"[rank3]: ", CHAINED)) == b""
    assert tracebacks.count == 3


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


NOW = datetime(2026, 11, 7, 1, 2, 3, 456789, tzinfo=timezone(timedelta(hours=1)))


def prefix(template, ranks=(3,), stream="stdout"):
    made = Prefix(template, now=lambda: NOW)
    made.learn_places({0: ("gpu01", 0), 1: ("gpu01", 1), 2: ("gpu02", 0), 3: ("gpu02", 1), 4: ("gpu03", 0)})
    return made.text_for(ranks, stream)


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("", b""),
        ("> ", b"> "),
        ("[{rank}]<{stream}>: ", b"[3]<stdout>: "),
        ("{host}/{local_rank} ", b"gpu02/1 "),
        ("{rank:03}|{host:>8}|{stream:.3}", b"003|   gpu02|std"),
        ("{{{rank}}}", b"{3}"),
        ("{host!r}{time!s}", b"gpu022026-11-07 01:02:03"),
        ("{rank:{local_rank}}", b"3"),
        ("{rank:{host}}", b"3"),
        ("{rank:c}", b"\x03"),
        ("{time} ", b"2026-11-07 01:02:03 "),
        ("{time:%H:%M:%S.%f %z}", b"01:02:03.456789 +0100"),
        (ASCTIME + "[{rank}]", b"Sat Nov  7 01:02:03 2026[3]"),
        ("é{rank}\udcff", b"\xc3\xa93\xff"),
    ],
)
def test_one_rank(template, made):
    assert prefix(template) == made


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("[{rank}]<{stream}>: ", b"[0-2,4]<stderr>: "),
        ("{host} {local_rank}: ", b"gpu[01-03] 0-1: "),
        ("{rank:03} {rank:>8}", b"0-2,4    0-2,4"),
        ("{rank:d}|", b"0-2,4|"),
    ],
)
def test_many_ranks(template, made):
    assert prefix(template, (0, 1, 2, 4), "stderr") == made


def test_ranks_with_a_common_host_or_local_rank():
    assert prefix("{host}:{local_rank:02} ", (0, 2, 4)) == b"gpu[01-03]:00 "
    assert prefix("{host}:{local_rank} ", (0, 1)) == b"gpu01:0-1 "


def test_a_rank_may_get_another_place():
    made = Prefix("{host} ")
    made.learn_places({0: ("a", 0)})
    assert made.text_for((0,), "stdout") == b"a "
    made.learn_places({0: ("b", 0)})
    assert made.text_for((0,), "stdout") == b"b "


def test_the_time_is_asked_for_each_time():
    times = iter([NOW, NOW + timedelta(seconds=1)])
    made = Prefix("{time:%S} ", now=lambda: next(times))
    assert [made.text_for((0,), "stdout") for _ in range(2)] == [b"03 ", b"04 "]


def test_the_default_time_is_now():
    before = datetime.now().astimezone()
    made = datetime.fromisoformat(Prefix("{time:%Y-%m-%dT%H:%M:%S.%f%z}").text_for((0,), "stdout").decode())
    assert before <= made <= datetime.now().astimezone()


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{rank:99999999999}", "a field would have thousands of characters"),
        ("{time:%99999Y}", "a field would have thousands of characters"),
        ("{lol}", "unknown field {lol}; try: {rank}, {host}, {local_rank}, {time}, {stream}"),
        ("{rank:{lol}}", "unknown field {lol}"),
        ("{}", "format string contains positional fields"),
        ("{0}", "format string contains positional fields"),
        ("{rank.real}", "a field has no part .real"),
        ("{host[0]}", "a field has no part [0]"),
        ("{host!x}", "unknown conversion specifier"),
        ("{host:d}", "unknown format code 'd'"),
        ("{time:\udcff}", "can't encode"),
        ("{rank", "expected '}' before end of string; try: a format of Python, or {{ and }}"),
        ("rank}", "single '}' encountered"),
        ("a\nb", "must be one line"),
        ("a\rb", "must be one line"),
    ],
)
def test_invalid_templates(template, part):
    with pytest.raises(BadUsage) as caught:
        Prefix(template)
    assert part in str(caught.value)
    assert repr(template) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_roles_are_shown_in_place_of_ranks():
    labelled = Prefix(labels=["train:0", "gen:0", "gen:1"])
    assert labelled.text_for((2,), "stdout") == b"[gen:1]<stdout>: "
    assert labelled.text_for((0, 2), "stderr") == b"[train:0,gen:1]<stderr>: "
