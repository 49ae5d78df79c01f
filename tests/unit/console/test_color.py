"""Whether and which colours."""

import re

import pytest

from hvlaunch.console.display import can_redraw, colored, paint_message, paint_prefix, paint_report

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
