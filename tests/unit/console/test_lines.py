import re
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvlaunch.console.lines import LONGEST, LineSplitter, Screen, TracebackFilter


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
