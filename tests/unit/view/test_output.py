"""Lines of output: the last of each rank, and those that are looked for."""

import pytest

from hvlaunch.console.stored import Stored
from hvlaunch.view.output import Tails, newest_lines_with


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        ([b"one\ntwo\n"], "two"),
        ([b"one\ntw", b"o"], "two"),
        ([b"one\n", b"\n \n"], "one"),
        ([b"10%\r20%\r", b"30%\r"], "30%"),
        ([b"10%\r20%\n"], "20%"),
        ([b"win\r\n"], "win"),
        ([b"x" * 9000], "x" * 512),
        ([b"\xff\n"], "\ufffd"),
        ([], ""),
    ],
)
def test_the_last_line(pieces, line):
    tails = Tails()
    for piece in pieces:
        tails.feed(0, "stdout", piece)
    assert tails.line(0) == line


def test_streams_are_not_mixed_up():
    tails = Tails()
    tails.feed(0, "stdout", b"out")
    tails.feed(0, "stderr", b"err\n")
    tails.feed(0, "stdout", b"put\n")
    assert tails.lines(0) == ["err", "output"]


def item(text, rank=0, kind="stdout", time=1.0):
    return Stored(time, kind, text, rank)


ITEMS = [
    item(b"Epoch 1\nloss ", time=1.0),
    item(b"epoch other\n", 1, time=2.0),
    item(b"0.5\n", time=3.0),
    item(b"oops: EPOCH\n", 1, "stderr", time=4.0),
    Stored(5.0, "said", b"epoch, says hvlaunch"),
    item(b"tail", 1, time=6.0),
    item(b"", 1, "stdout ended", time=7.0),
]


@pytest.mark.parametrize(
    ("text", "ranks", "count", "found"),
    [
        ("epoch", None, 10, ["Epoch 1", "epoch other", "oops: EPOCH", "epoch, says hvlaunch"]),
        ("epoch", {1}, 10, ["epoch other", "oops: EPOCH"]),
        ("epoch", None, 2, ["oops: EPOCH", "epoch, says hvlaunch"]),
        ("loss 0", None, 10, ["loss 0.5"]),
        ("tail", None, 10, ["tail"]),
        ("nothing", None, 10, []),
    ],
)
def test_lines_with_a_text(text, ranks, count, found):
    lines = newest_lines_with(ITEMS, text, ranks, count)
    assert [line["text"] for line in lines] == found


def test_unfinished_line_is_found():
    assert newest_lines_with([item(b"half a li")], "half", None, 5)[0]["rank"] == 0
