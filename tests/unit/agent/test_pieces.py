"""Pieces: whatever others print between them, what was sent comes out, and the rest is noise."""

import os
import select
import threading
from itertools import chain, pairwise, zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import START, Decoder, PieceWriter
from hvlaunch.driver.links.agent_channel import Garbled, PieceReader

SENT = st.lists(st.one_of(st.binary(max_size=50), st.binary(min_size=4000, max_size=9000)), max_size=4)
NOISE = st.lists(
    st.one_of(
        st.binary(max_size=30).filter(lambda noise: START not in noise),
        st.sampled_from([START[:k] for k in range(len(START))]),
    )
)


class Ear:
    """What comes through a reader, and what does not."""

    def __init__(self) -> None:
        self.noise = b""
        self.got = b""
        self.reader = PieceReader(self._hear)

    def _hear(self, noise: bytes) -> None:
        assert noise
        self.noise += noise

    def feed(self, *chunks: bytes) -> "Ear":
        for chunk in chunks:
            self.got += self.reader.feed(chunk)
        return self


@given(SENT, NOISE, st.lists(st.integers(0, 30_000), max_size=8))
def test_any_noise_between_pieces_in_any_chunks(
    sent: list[bytes], noise: list[bytes], cuts: list[int]
) -> None:
    writer = PieceWriter()
    pieces = [piece for data in sent for piece in writer.cut(data)]
    noise = noise[: len(pieces)]
    data = b"".join(chain.from_iterable(zip_longest(noise, pieces, fillvalue=b"")))
    edges = [0, *sorted(min(edge, len(data)) for edge in cuts), len(data)]
    ear = Ear().feed(*(data[start:end] for start, end in pairwise(edges)))
    assert ear.got == b"".join(sent)
    assert ear.noise == b"".join(noise)


@given(st.binary(min_size=1, max_size=9000), st.integers(0, 9100), st.binary(min_size=1, max_size=100))
def test_noise_within_a_piece_is_garbled_or_not_yet_whole(sent: bytes, at: int, noise: bytes) -> None:
    data = b"".join(PieceWriter().cut(sent))
    at = min(at, len(data))
    ear = Ear()
    try:
        ear.feed(data[:at] + noise + data[at:])
    except Garbled:
        return
    assert sent.startswith(ear.got)


@pytest.mark.parametrize("at", [1, 9, 12, 4000, 4094, 4100])
def test_noise_within_a_piece_is_noticed(at: int) -> None:
    """Also where it hits a mark, which hides the piece: the next one's number is then not the one awaited."""
    data = b"".join(PieceWriter().cut(bytes(range(256)) * 64))
    with pytest.raises(Garbled):
        Ear().feed(data[:at] + b"backup: 1 of 5\n" + data[at:])


def test_noise_is_reported_as_it_comes() -> None:
    ear = Ear().feed(b"Connection", b" to n1\n")
    assert ear.noise == b"Connection to n1\n"
    assert ear.feed(START[:5]).noise == b"Connection to n1\n"
    assert ear.feed(b"x").noise == b"Connection to n1\n" + START[:5] + b"x"


def test_pieces_into_a_pipe_that_others_write_to() -> None:
    """The kernel keeps the promise that all of this stands on."""
    read, write = os.pipe()
    sent = os.urandom(1 << 20)
    begun, done = threading.Event(), threading.Event()

    def print_on() -> None:
        while not done.is_set():
            os.write(write, b"tick tock\n" * 7)
            begun.set()

    def send() -> None:
        begun.wait()
        for piece in PieceWriter().cut(sent):
            assert os.write(write, piece) == len(piece)

    writers = [threading.Thread(target=target) for target in (print_on, send)]
    for writer in writers:
        writer.start()
    ear = Ear()
    while len(ear.got) < len(sent):
        ear.feed(os.read(read, 1 << 16))
    done.set()
    while any(writer.is_alive() for writer in writers):
        if select.select([read], [], [], 0.01)[0]:
            os.read(read, 1 << 16)
    assert ear.got == sent
    assert b"tick tock\n" in ear.noise
    os.close(read)
    os.close(write)


def test_small_frames_that_are_written_together_share_a_piece() -> None:
    read, write = os.pipe()
    channel = DriverChannel(os.open(os.devnull, os.O_RDONLY), write)
    for number in range(3):
        channel.send({"type": "pong", "at": number})
    channel.flush()
    data, ear = os.read(read, 1 << 16), Ear()
    assert data.count(START) == 1
    ear.feed(data)
    assert [header["at"] for header, _ in Decoder().feed(ear.got)] == [0, 1, 2]
    os.close(read)
    os.close(write)
