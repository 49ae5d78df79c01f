import json
import struct
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.agent.wire.frames import BadFrame, Decoder, encode

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

TEXT = st.text(st.characters(), max_size=20)
HEADERS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.none(), st.booleans()), max_size=4)
FRAMES = st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=6)


def decode_all(decoder: Decoder, *chunks: bytes) -> list["Frame"]:
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


@given(FRAMES, st.lists(st.integers(0, 3000), max_size=12))
def test_frames_survive_any_chunking(frames: list["Frame"], cuts: list[int]) -> None:
    sent = [({**header, "type": "any"}, body) for header, body in frames]
    data = b"".join(encode(header, body) for header, body in sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in pairwise(edges)]
    assert decode_all(Decoder(), *chunks) == sent


@given(st.binary(max_size=400))
def test_any_bytes_are_frames_or_a_bad_frame(data: bytes) -> None:
    try:
        frames = decode_all(Decoder(), data)
    except BadFrame:
        return
    assert all(isinstance(header["type"], str) for header, _ in frames)


@given(st.binary(max_size=200))
def test_any_header_is_a_header_or_a_bad_frame(header: bytes) -> None:
    data = struct.pack("!II", len(header), 0) + header
    try:
        [(decoded, _)] = decode_all(Decoder(), data)
    except BadFrame:
        return
    assert decoded == json.loads(header)


@pytest.mark.parametrize("lengths", [(1 << 21, 0), (2, 1 << 29), (0xFFFFFFFF, 0xFFFFFFFF), (0x53534820, 1)])
def test_huge_frame_is_refused_before_its_bytes_arrive(lengths: tuple[int, int]) -> None:
    with pytest.raises(BadFrame, match="a frame of"):
        decode_all(Decoder(), struct.pack("!II", *lengths))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"not json",
        b'{"type": "caf\xc3\xa9"}',
        b"[]",
        b'"type"',
        b"{}",
        b'{"type": 1}',
        b'{"type": null}',
        b"[" * 200_000,
        b'{"type":' * 100_000,
    ],
)
def test_broken_header_is_refused(header: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_all(Decoder(), struct.pack("!II", len(header), 0) + header)


def test_frames_before_a_bad_frame_are_returned() -> None:
    frames = Decoder().feed(encode({"type": "ping"}) + b"\xff" * 8)
    assert next(frames) == ({"type": "ping"}, b"")
    with pytest.raises(BadFrame):
        next(frames)


def test_bytes_that_are_not_utf8_travel_as_surrogates() -> None:
    header = {"type": "start", "name": b"\xff\xfe".decode("utf-8", "surrogateescape")}
    assert decode_all(Decoder(), encode(header)) == [(header, b"")]
