"""One display: lines, bars, messages, colours and merging on a terminal and in a pipe, on a clock of the test's; and the rows at the bottom of a terminal."""

import io
import re
from typing import Final

import pytest

from hvlaunch.console.display import (
    Display,
    LiveRows,
    can_redraw,
    colored,
    paint_message,
    paint_prefix,
    paint_report,
)
from hvlaunch.console.lines import Prefix
from hvlaunch.console.raw_file import RawFile
from hvlaunch.console.status import Status

OUT: Final = "stdout"
ERR: Final = "stderr"


class Place:
    """A display and what was written to it."""

    def __init__(self, *, color=False, live_rows=0, merge=False, template="[{rank}] "):
        memory = RawFile(io.BytesIO(), "memory")
        self.display = Display(
            {OUT: memory, ERR: memory}, Prefix(template), color=color, live_rows=live_rows, merge=merge
        )
        self.written = b""
        self.now = 0.0

    def flush(self, seconds=0.0):
        """Let time pass as the printer does, and return what is written meanwhile."""
        end, before = self.now + seconds, len(self.written)
        while True:
            while page := self.display.page(self.now):
                self.written += b"".join(part for _, parts in page for part in parts)
            deadline = self.display.deadline
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
        self.now = end
        return self.written[before:]

    def expect(self, ranks):
        self.display.learn_places({rank: (f"gpu{rank // 2}", rank % 2) for rank in ranks})

    def output(self, rank, data, stream=OUT):
        self.display.output((rank, stream), data, self.now)


def test_a_pipe_gets_only_lines():
    pipe = Place()
    pipe.output(0, b"one\n")
    pipe.output(1, b"\r10%\r20%")
    pipe.display.say("message")
    assert pipe.flush(5) == b"[0] one\nhvlaunch: message\n[1] 20%\n"
    assert b"\x1b" not in pipe.written
    assert pipe.display.deadline is None


def test_a_pipe_gets_the_status_only_after_a_long_wait():
    pipe = Place()
    pipe.display.status(lambda: Status(f"connecting 0/2, {pipe.now:.0f} s\nlog in: a\nagent: b"), 0.0)
    assert pipe.flush(4.9) == b""
    pipe.display.status(lambda: Status(f"connecting 1/2, {pipe.now:.0f} s\nlog in: a"), pipe.now)
    told = b"hvlaunch: connecting 1/2, %d s: log in: a\n"
    assert pipe.flush(60) == b"".join(told % seconds for seconds in (5, 10, 20, 40))
    pipe.display.status(None, pipe.now)
    assert pipe.flush(600) == b""
    assert pipe.display.deadline is None


def test_bars_below_and_lines_above(terminal):
    place = Place(live_rows=8)
    place.output(1, b"\r10%", ERR)
    place.output(0, b"\r20%", ERR)
    terminal.feed(place.flush(1))
    assert terminal.shown == "[0] 20%\n[1] 10%"
    place.output(0, b"epoch 1\n")
    place.display.say("message")
    place.output(1, b"\r30%", ERR)
    terminal.feed(place.flush(1))
    assert terminal.shown == "[0] epoch 1\nhvlaunch: message\n[0] 20%\n[1] 30%"
    place.output(0, b"\r100%\n", ERR)
    terminal.feed(place.flush())
    assert terminal.shown == "[0] epoch 1\nhvlaunch: message\n[0] 100%\n[1] 30%"
    place.display.end_stream((1, ERR), place.now)
    terminal.feed(place.flush())
    assert terminal.shown == "[0] epoch 1\nhvlaunch: message\n[0] 100%\n[1] 30%"
    assert terminal.row == 4, "a line now, and no live row"
    assert place.display.deadline is None


def test_a_terminal_is_not_flooded():
    place = Place(live_rows=8)
    for number in range(1000):
        place.output(0, b"\r%d" % number)
        place.flush(0.01)
    pictures = place.written.count(b"\x1b[?7l")
    assert 50 <= pictures <= 110  # 10 s


def test_more_bars_than_rows(terminal):
    place = Place(live_rows=3)
    for rank in range(20):
        place.output(rank, b"\rbar")
    terminal.feed(place.flush(1))
    assert terminal.shown == "[0] bar\n[1] bar\n[2] bar\n... and 17 more"


def test_only_one_live_row_if_another_program_may_write(terminal):
    place = Place(live_rows=1)
    for rank in range(20):
        place.output(rank, b"\rbar")
    assert b"\x1b[1A" not in place.flush(1)
    assert terminal.feed(place.written).shown == "[0] bar"


def test_no_live_rows_inside_a_long_line(terminal):
    place = Place(live_rows=8)
    place.output(1, b"\r10%", ERR)
    terminal.feed(place.flush(1))
    long = b"x" * (1 << 20)
    place.output(0, long)
    written = place.flush(1)
    assert written.endswith(b"x")
    place.output(1, b"\r20%", ERR)
    assert place.flush(1) == b""
    place.output(0, b"end\n")
    assert place.flush(1).startswith(b"end\n")
    assert place.written.endswith(b"[1] 20%\x1b[0m\x1b[?7h\r")


def test_ending_all_streams_removes_the_live_rows(terminal):
    place = Place(live_rows=8)
    place.display.status(lambda: Status("waiting"), 0.0)
    place.output(0, b"\r50%")
    terminal.feed(place.flush(2))
    assert terminal.shown == "[0] 50%\nhvlaunch: waiting"
    place.display.end_all(place.now)
    terminal.feed(place.flush())
    assert terminal.shown == "[0] 50%"
    assert (terminal.row, terminal.column) == (1, 0)


def test_a_status_of_several_lines_is_asked_again_each_second(terminal):
    place = Place(live_rows=8)
    place.display.status(lambda: Status(f"connecting 0/2, {place.now:.0f} s\nlog in: a\nagent: b"), 0.0)
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["hvlaunch: connecting 0/2, 1 s", "  log in: a", "  agent: b"]
    assert terminal.row == 0, "the cursor waits above, where a question for a passphrase begins"
    terminal.feed(b"Enter passphrase for key 'k': \n")
    terminal.feed(place.flush(2))
    assert terminal.shown.splitlines()[:2] == [
        "Enter passphrase for key 'k':",
        "hvlaunch: connecting 0/2, 3 s",
    ]
    place.display.status(None, place.now)
    terminal.feed(place.flush())
    assert terminal.shown == "Enter passphrase for key 'k':"


def test_an_ended_status_leaves_no_row(terminal):
    place = Place(live_rows=8)
    place.display.status(lambda: Status("connecting 0/1: waiting for \x1b[31mb"), 0.0)
    assert place.flush(0.9) == b""
    terminal.feed(place.flush(0.2))
    assert terminal.shown == r"hvlaunch: connecting 0/1: waiting for \x1b[31mb"
    place.display.status(None, place.now)
    terminal.feed(place.flush())
    assert terminal.shown == ""


def test_colours():
    place = Place(color=True)
    place.output(0, b"a\n")
    place.output(10, b"b\n")
    place.display.say("message")
    place.display.show("hvlaunch: report\n  Try: this\n")
    written = place.flush()
    assert re.sub(rb"\x1b\[[0-9;]*m", b"", written) == (
        b"[0] a\n[10] b\nhvlaunch: message\nhvlaunch: report\n  Try: this\n"
    )
    colour = rb"\x1b\[0;(\d+)m"
    assert re.findall(colour + rb"\[0\] \x1b\[0ma\n", written) == re.findall(
        colour + rb"\[10\] \x1b\[0mb\n", written
    )
    assert len(re.findall(colour, written)) == 4


def test_messages_and_reports_are_escaped():
    place = Place()
    place.display.say("host said \x1b[2J\rx\n and \udcff\n")
    place.display.show("\tquoted \x07\n")
    assert place.flush() == (b"hvlaunch: host said \\x1b[2J\\rx\nhvlaunch:  and \\udcff\n\tquoted \\x07\n")


def test_merged_lines_have_their_set():
    place = Place(merge=True, template="[{rank} {host}]<{stream}>: ")
    place.expect(range(8))
    for rank in range(8):
        place.output(rank, b"loading\nshard %d\n" % (rank // 4))
        place.output(rank, b"warning\n", ERR)
    assert place.flush(1) == (
        b"[0-7 gpu[0-3]]<stdout>: loading\n"
        b"[4-7 gpu[2-3]]<stdout>: shard 1\n[0-3 gpu[0-1]]<stdout>: shard 0\n"
        b"[0-7 gpu[0-3]]<stderr>: warning\n"
    )


def test_merging_waits_a_moment_for_a_twin_and_no_longer():
    place = Place(merge=True)
    place.expect(range(2))
    place.output(0, b"a\n")
    assert place.flush(0.1) == b""
    place.output(1, b"a\n")
    assert place.flush() == b"[0-1] a\n"
    place.output(1, b"b\n")
    assert place.flush(0.1) == b""
    assert place.flush(0.2) == b"[1] b\n"


def test_merged_colours_are_of_no_rank():
    place = Place(merge=True, color=True)
    place.expect(range(2))
    for rank in range(2):
        place.output(rank, b"a\n")
    assert place.flush() == b"\x1b[0;1m[0-1] \x1b[0ma\n"


def test_a_long_line_is_not_merged_and_disturbs_no_order():
    place = Place(merge=True)
    place.expect(range(2))
    long = b"x" * (1 << 20)
    place.output(0, b"before\n")
    place.output(0, long)
    place.output(1, b"other\n")
    place.output(0, b"end\nafter\n")
    place.display.end_all(place.now)
    shown = place.flush().replace(long, b"LONG").splitlines()
    assert shown == [b"[0] before", b"[0] LONG", b"[1] other", b"[0] end", b"[0] after"]


@pytest.mark.parametrize("merge", [False, True])
def test_unfinished_lines_are_printed_at_the_end(merge):
    place = Place(merge=merge)
    place.expect(range(3))
    place.output(2, b"half")
    place.output(0, b"whole\n\r50%")
    place.output(1, b"\r10%\r")
    place.display.end_all(place.now)
    assert place.flush() == b"[0] whole\n[0] 50%\n[1] 10%\n[2] half\n"


# Prompts


def asking(terminal, *, ranks=(0,)):
    place = Place(live_rows=8)
    place.display.read_by(ranks)
    place.output(0, b"hello\nName? ")
    terminal.feed(place.flush(0.1))
    assert terminal.shown == "[0] hello"
    terminal.feed(place.flush(0.1))
    assert terminal.shown.splitlines() == ["[0] hello", "[0] Name?"]
    assert (terminal.row, terminal.column) == (1, len("[0] Name? "))
    return place


def test_a_stdin_readers_prompt_is_shown_and_the_answer_follows(terminal):
    place = asking(terminal)
    assert place.display.deadline is None
    terminal.feed(b"bob\n")
    place.display.answered(place.now)
    place.output(0, b"hello bob\n")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[0] Name? bob", "[0] hello bob"]


def test_lines_of_others_stand_above_a_prompt(terminal):
    place = asking(terminal)
    place.output(1, b"one\n\r50%")
    place.display.say("message")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[1] one", "hvlaunch: message", "[0] Name?"]
    terminal.feed(b"bob\n")
    place.display.answered(place.now)
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines()[-2:] == ["[0] Name? bob", "[1] 50%"]


def test_a_bar_does_not_overwrite_the_users_input(terminal):
    place = asking(terminal)
    terminal.feed(b"bo")
    place.output(1, b"\r50%")
    assert place.flush(5) == b""


def test_output_between_the_answer_and_its_event(terminal):
    """The prompt was drawn again below the answer: that goes."""
    place = asking(terminal)
    terminal.feed(b"bob\n")
    place.output(1, b"one\n")
    terminal.feed(place.flush(0.1))
    place.display.answered(place.now)
    place.output(0, b"hello bob\n")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[0] Name? bob", "[1] one", "[0] hello bob"]


def test_a_prompt_without_an_answer_is_a_line_in_the_end(terminal):
    place = asking(terminal)
    place.display.end_stream((0, OUT), place.now)
    place.display.end_all(place.now)
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[0] Name?"]
    assert (terminal.row, terminal.column) == (2, 0)


def test_a_continued_line_is_no_prompt(terminal):
    place = asking(terminal)
    place.output(0, b"thanks\n")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[0] Name? thanks"]


def test_an_answer_before_the_prompt_changes_nothing(terminal):
    place = Place(live_rows=8)
    place.display.read_by([0])
    place.output(0, b"Name? ")
    place.display.answered(place.now)
    place.output(0, b"hello bob\n")
    assert terminal.feed(place.flush(1)).shown == "[0] Name? hello bob"


def test_only_stdin_readers_have_prompts(terminal):
    place = Place(live_rows=8)
    place.display.read_by([0])
    place.output(1, b"half a line")
    assert place.flush(5) == b""
    pipe = Place()
    pipe.display.read_by([0])
    pipe.output(0, b"Name? ")
    assert pipe.flush(5) == b""


def test_the_lowest_ranks_prompt_is_shown(terminal):
    place = asking(terminal, ranks=range(2))
    place.output(1, b"hello\nName? ")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines() == ["[0] hello", "[1] hello", "[0] Name?"]
    terminal.feed(b"bob\n")
    place.display.answered(place.now)
    for rank in range(2):
        place.output(rank, b"hello bob\n")
    terminal.feed(place.flush(1))
    assert terminal.shown.splitlines()[2:] == ["[0] Name? bob", "[0] hello bob", "[1] hello bob"]


def test_no_prompt_inside_a_long_line_of_another(terminal):
    place = Place(live_rows=8)
    place.display.read_by([0])
    place.output(1, b"x" * (1 << 20))
    place.output(0, b"Name? ")
    place.flush(1)
    assert place.flush(1) == b""
    assert place.display.deadline is None
    place.output(1, b"end\n")
    assert b"Name? " in place.flush(1)


def redraw(live, terminal, rows, now=0.0, text=b""):
    terminal.feed(live.erase() + text + live.draw(rows, now))
    return terminal.shown


def test_rows_are_replaced_in_place(terminal):
    live = LiveRows()
    terminal.feed(b"above\n")
    assert redraw(live, terminal, [b"a 1", b"b 1"]) == "above\na 1\nb 1"
    assert redraw(live, terminal, [b"a 22", b"b 22", b"c"]) == "above\na 22\nb 22\nc"
    assert redraw(live, terminal, [b"a"]) == "above\na"
    assert redraw(live, terminal, [b"a"], text=b"more\n") == "above\nmore\na"
    assert redraw(live, terminal, []) == "above\nmore"
    assert (terminal.row, terminal.column) == (2, 0)


def test_a_wide_row_is_cut_by_the_terminal(terminal):
    live = LiveRows()
    wide = "é".encode() * 200
    redraw(live, terminal, [wide, wide])
    assert len(terminal.lines) == 2
    assert redraw(live, terminal, [b"a"]) == "a"


def test_rows_cannot_move_the_cursor(terminal):
    live = LiveRows()
    row = b"\x1b[Aup\x1b[2K\x1b]0;\x07\tx\n\x1b[31mred\x1bM\x08\xc2\x9b5Cend\xff"
    drawn = live.draw([row], 0.0)
    assert b"\x1b[31mred" in drawn, "colours stay"
    assert terminal.feed(drawn).shown == "upxred5Cend\ufffd"
    assert len(terminal.lines) == 1


def test_a_status_is_shown_after_a_second_and_only_then_asked_for(terminal):
    live, asked = LiveRows(), []

    def status():
        asked.append(True)
        return [b"waiting for b", b"  and c"]

    assert live.deadline is None
    live.status(status, 5.0)
    assert live.deadline is not None
    assert redraw(live, terminal, [], 5.0) == ""
    assert live.deadline == 6.0
    assert redraw(live, terminal, [b"bar"], 5.9) == "bar"
    assert not asked
    assert redraw(live, terminal, [b"bar"], 6.0) == "bar\nwaiting for b\n  and c"
    assert live.deadline == 7.0
    redraw(live, terminal, [b"bar"], 6.9)
    assert asked == [True]
    redraw(live, terminal, [b"bar"], 7.0)
    assert asked == [True, True]


def test_a_second_is_counted_from_the_first_status(terminal):
    live = LiveRows()
    live.status(lambda: [b"one"], 0.0)
    live.status(lambda: [b"two"], 0.9)
    assert redraw(live, terminal, [], 1.0) == "two"
    live.status(None, 1.05)
    assert live.deadline == 1.05
    assert redraw(live, terminal, [], 1.05) == ""
    live.status(lambda: [b"three"], 2.0)
    assert redraw(live, terminal, [], 2.5) == ""
    assert redraw(live, terminal, [], 3.0) == "three"


def test_many_changes_are_few_pictures():
    live = LiveRows()
    live.draw([b"1"], 1.0)
    assert live.deadline is None
    live.touch()
    assert live.deadline is not None
    assert 1.05 < live.deadline <= 1.2


XTERM = {"TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("policy", "terminal", "environ", "expected"),
    [
        ("auto", True, XTERM, True),
        ("auto", False, XTERM, False),
        ("auto", True, XTERM | {"NO_COLOR": "1"}, False),
        ("auto", True, XTERM | {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", True, {}, False),
        ("always", False, {"TERM": "dumb", "NO_COLOR": "1"}, True),
        ("never", True, XTERM, False),
    ],
)
def test_whether(policy, terminal, environ, expected):
    assert colored(policy, terminal=terminal, environ=environ) is expected


def test_a_dumb_terminal_is_not_redrawn_but_one_without_colour_is():
    assert not can_redraw(terminal=True, environ={"TERM": "dumb"})
    assert can_redraw(terminal=True, environ=XTERM | {"NO_COLOR": "1"})


def test_a_rank_always_has_the_same_colour_and_neighbours_have_others():
    codes = [paint_prefix(b"p", (rank,)) for rank in range(30)]
    assert codes[:10] == codes[10:20] == codes[20:]
    assert len(set(codes)) == 10
    assert paint_prefix(b"p", (0, 1)) not in codes


def test_colours_of_the_prefix_and_of_the_worker_are_reset():
    assert re.fullmatch(rb"\x1b\[0;\d+m\[3\]\x1b\[0m", paint_prefix(b"[3]", (3,)))
    assert paint_message(b"hvlaunch: ").endswith(b"hvlaunch: \x1b[0m")


def test_no_prefix_has_no_colour():
    assert paint_prefix(b"", (3,)) == b""


def test_of_a_report_the_headline_and_the_advice_stand_out():
    report = "hvlaunch: rank 1 failed\n  Its last lines of stderr:\n    Try: no\n  Try: this\n"
    painted = paint_report(report).split("\n")
    assert re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(painted)) == report
    assert ["\x1b" in line for line in painted] == [True, False, False, True, False]
