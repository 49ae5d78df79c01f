"""The end of a stream."""

import pytest

from hvlaunch.ssh.pipes import Tail


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        ([], b""),
        ([b"ab"], b"ab"),
        ([b"abcd"], b"abcd"),
        ([b"abcdef"], b"cdef"),
        ([b"abc", b"", b"de"], b"bcde"),
        ([b"a"] * 9 + [b"b"], b"aaab"),
    ],
)
def test_the_last_bytes_are_kept(pieces, kept):
    tail = Tail(size=4)
    for piece in pieces:
        tail.add(piece)
    assert tail.get() == kept
