"""What flags take; the rest of them is in test_arguments.py."""

import pytest

from hvlaunch.cli.options import BadValue, values


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("7", [7]),
        ("0,8-15", [0, *range(8, 16)]),
        ("3-3", [3]),
        ("0-6/2, 9", [0, 2, 4, 6, 9]),
        ("5,5,1", [5, 5, 1]),
        ("007", [7]),
    ],
)
def test_ranks(text, ranks):
    assert [rank for part in values.ranks(text) for rank in part] == ranks


def test_a_large_range_costs_nothing():
    (part,) = values.ranks("0-999999999")
    assert 999_999_999 in part


@pytest.mark.parametrize(
    "text", ["", ",", "0,", "-1", "1-", "3-1", "0-4/0", "0/2", "a", "0..3", "1 2", "٣", "1" * 10, "[0-3]"]
)
def test_no_ranks(text):
    with pytest.raises(BadValue, match=r"has no rank in it|is neither a rank nor a range"):
        values.ranks(text)


@pytest.mark.parametrize(
    ("text", "ports"), [("1-2", (1, 2)), ("29500-29599", (29500, 29599)), ("1-65535", (1, 65535))]
)
def test_ports(text, ports):
    assert values.ports(text) == ports


@pytest.mark.parametrize(
    "text", ["", "1", "-", "1-", "-1", "0-5", "5-65536", "5-5", "6-5", "a-b", "1-2-3", "1:2"]
)
def test_no_ports(text):
    with pytest.raises(BadValue, match=r"is not|does not have the two ports"):
        values.ports(text)


def test_a_port_may_be_any():
    assert [values.port_or_any(text) for text in ("0", "1", "65535")] == [0, 1, 65535]
    for text in ("-1", "65536", "x"):
        with pytest.raises(BadValue):
            values.port_or_any(text)


def test_words():
    assert values.words("--bind-to core 'a b'") == ("--bind-to", "core", "a b")
    with pytest.raises(BadValue, match="no closing quotation"):
        values.words("a 'b")


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("300", 300), ("64K", 64 << 10), ("5M", 5 << 20), ("2G", 2 << 30)]
)
def test_sizes(text, size):
    assert values.size(text) == size


@pytest.mark.parametrize("text", ["", "K", "5m", "5s", "1.5G", "-1", "1" * 13, "5T"])
def test_no_sizes(text):
    with pytest.raises(BadValue, match="is not a size"):
        values.size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("8h", 28_800), ("2d", 172_800)]
)
def test_spans(text, seconds):
    assert values.span(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "5M", "5K", "h", "1.5h"])
def test_no_spans(text):
    with pytest.raises(BadValue, match="is not a time"):
        values.span(text)
