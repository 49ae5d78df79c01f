"""--merge: equal lines of several ranks, once; every rank's own order kept."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.console.merge import _MOST_BYTES, _MOST_LINES, _WINDOW, Merger


def merged(*writes, ranks=range(4)):
    """All that came of writes (rank, lines) at one moment, before the window is over and behind it."""
    merger = Merger()
    merger.expect(ranks)
    for rank, lines in writes:
        merger.add(rank, "stdout", lines, 0.0)
    return [(who, text) for who, _, text in merger.take_lines(0.0) + merger.take_lines(_WINDOW)]


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("writes", "printed"),
    [
        ([], []),
        ([(0, b"a\nb\n")], [((0,), b"a\nb\n")]),
        ([(rank, b"a\nb\n") for rank in (2, 0, 3, 1)], [(ALL, b"a\nb\n")]),
        ([(0, b"a\n"), (2, b"a\n")], [((0, 2), b"a\n")]),
        ([(0, b"a\na\n"), (1, b"a\n")], [((0, 1), b"a\n"), ((0,), b"a\n")]),
        ([(0, b"x\n"), (1, b"y\n"), (0, b"z\n")], [((0,), b"x\n"), ((1,), b"y\n"), ((0,), b"z\n")]),
        # each rank has lines of its own in the middle, and the first is ahead with all of its lines
        (
            [(rank, b"a\nmine %d\nb\n" % rank) for rank in ALL],
            [(ALL, b"a\n"), *(((rank,), b"mine %d\n" % rank) for rank in ALL), (ALL, b"b\n")],
        ),
        # one rank says more than the others, whoever is first
        ([(0, b"a\nmore\nb\n"), (1, b"a\nb\n")], [((0, 1), b"a\n"), ((0,), b"more\n"), ((0, 1), b"b\n")]),
        ([(1, b"a\nb\n"), (0, b"a\nmore\nb\n")], [((0, 1), b"a\n"), ((0,), b"more\n"), ((0, 1), b"b\n")]),
        # the same lines in another order can't be merged all
        ([(0, b"a\nb\n"), (1, b"b\na\n")], [((0,), b"a\n"), ((0, 1), b"b\n"), ((1,), b"a\n")]),
        ([(0, b"\xff\n\n"), (1, b"\xff\n\n")], [((0, 1), b"\xff\n\n")]),
    ],
)
def test_merging(writes, printed):
    assert merged(*writes) == printed


def test_a_line_of_all_ranks_is_due_at_once():
    merger = Merger()
    merger.expect([0, 1])
    merger.add(0, "stdout", b"a\nb\n", 0.0)
    assert merger.take_lines(0.0) == []
    merger.add(1, "stdout", b"a\n", 0.1)
    assert merger.take_lines(0.1) == [((0, 1), "stdout", b"a\n")]
    assert merger.deadline == _WINDOW


def test_an_ended_stream_delays_no_line():
    merger = Merger()
    merger.expect([0, 1])
    merger.ended(1, "stderr")
    merger.add(0, "stdout", b"a\n", 0.0)
    merger.add(0, "stderr", b"b\n", 0.0)
    assert merger.take_lines(0.0) == []
    merger.ended(1, "stdout")
    assert merger.take_lines(0.0) == [((0,), "stdout", b"a\n"), ((0,), "stderr", b"b\n")]
    assert merger.deadline is None


def test_the_window_is_each_lines_own():
    merger = Merger()
    merger.expect([0, 1])
    merger.add(0, "stdout", b"a\n", 0.0)
    merger.add(0, "stdout", b"b\n", 0.1)
    assert merger.take_lines(_WINDOW - 0.01) == []
    assert merger.take_lines(_WINDOW) == [((0,), "stdout", b"a\n")]
    merger.add(1, "stdout", b"b\n", _WINDOW)
    assert merger.take_lines(_WINDOW) == [((0, 1), "stdout", b"b\n")]


def test_streams_are_not_merged_with_each_other():
    merger = Merger()
    merger.expect([0, 1])
    merger.add(0, "stdout", b"a\n", 0.0)
    merger.add(1, "stderr", b"a\n", 0.0)
    assert merger.take_lines(_WINDOW) == [((0,), "stdout", b"a\n"), ((1,), "stderr", b"a\n")]


@pytest.mark.parametrize(
    "lines", [b"".join(b"%d\n" % number for number in range(_MOST_LINES + 1)), b"x" * _MOST_BYTES + b"\n"]
)
def test_no_more_is_held_than_memory_allows(lines):
    merger = Merger()
    merger.expect([0, 1])
    merger.add(0, "stdout", lines, 0.0)
    assert merger.take_lines(0.0) == [((0,), "stdout", lines)]


def test_many_lines_put_in_at_one_place_keep_their_order():
    own = [b"%d\n" % number for number in range(300)]
    first = (0, b"a\nz\n")
    printed = merged(first, (1, b"a\n" + b"".join(own) + b"z\n"))
    assert printed == [((0, 1), b"a\n"), ((1,), b"".join(own)), ((0, 1), b"z\n")]


writes = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\n"]), max_size=4),
        st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    ),
    max_size=30,
)


@given(writes)
def test_each_rank_keeps_its_lines_in_order(writes):
    merger = Merger()
    merger.expect(range(4))
    now, printed = 0.0, []
    written: defaultdict[int, list[bytes]] = defaultdict(list)
    seen: defaultdict[int, list[bytes]] = defaultdict(list)
    for rank, lines, pause in writes:
        now += pause
        merger.add(rank, "stdout", b"".join(lines), now)
        written[rank] += lines
        printed += merger.take_lines(now)
        assert merger.deadline is None or merger.deadline > now
    printed += merger.take_lines(now, everything=True)
    for ranks, _, text in printed:
        for rank in ranks:
            seen[rank] += text.splitlines(keepends=True)
    assert {rank: lines for rank, lines in seen.items() if lines} == {
        rank: lines for rank, lines in written.items() if lines
    }
    assert merger.deadline is None
    assert merger.take_lines(now, everything=True) == []
