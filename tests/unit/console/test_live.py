"""The rows at the bottom of a terminal."""

from hvlaunch.console.display import LiveRows


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
