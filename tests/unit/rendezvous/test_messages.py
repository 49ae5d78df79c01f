"""What workers and driver write to each other about rounds."""

import pytest

from hvlaunch.rendezvous.messages import Ask, Beat, Grant, Notice, decode, encode


@pytest.mark.parametrize(
    "message",
    [
        Ask(round=-1, commit=-1),
        Ask(2, 5, "Connection closed by peer"),
        Grant(3, 1, 4, 1, 2, 0, 2, "10.0.0.1", "eth0"),
        Grant(round=-1, leave="host b left the pool"),
        Notice("broken", "rank 3 on host b: killed by SIGKILL"),
        Beat(12),
        Beat(12, last=True),
    ],
)
def test_what_is_encoded_is_decoded(message):
    assert decode(type(message), encode(message)) == message


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"round":"1","commit":2}',
        b'{"round":true,"commit":2}',
        b'{"round":1,"commit":2,"more":3}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_a_value_error(value):
    with pytest.raises(ValueError, match=r".+"):
        decode(Ask, value)
