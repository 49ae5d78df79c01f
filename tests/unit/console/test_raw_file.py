import fcntl
import io
import os
import select
import socket
import struct
import termios
import tty

import pytest

from hvlaunch.console.printer import BATCH
from hvlaunch.console.raw_file import RawFile, same_place


def test_a_file_in_memory():
    file = io.BytesIO()
    RawFile(file, "stdout").write([b"text"])
    assert file.getvalue() == b"text"


def test_buffered_bytes_come_first(pipe):
    read, write = pipe
    write.write(b"before ")
    RawFile(write, "stdout").write([b"after\n"])
    assert read.readline() == b"before after\n"


@pytest.fixture
def socket_pair():
    ours, theirs = socket.socketpair()
    with ours.makefile("rb") as read, theirs.makefile("wb") as write:
        ours.close()
        theirs.close()
        yield read, write


@pytest.fixture
def screen():
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with os.fdopen(ours, "rb") as read, os.fdopen(theirs, "wb") as write:
        yield read, write


def test_a_full_pipe_is_enlarged(pipe):
    _, write = pipe
    file = RawFile(write, "stdout")
    before = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    assert file.write([b"x" * before]) == []
    assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == before  # most never are
    assert file.write([b"x" * BATCH]) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket_pair", "screen"])
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_the_unwritten_rest_arrives_in_order(request, kind, count):
    """Nothing waits in it, and the descriptor stays as it is for others."""
    read, write = request.getfixturevalue(kind)
    file = RawFile(write, "stdout")
    parts = [os.urandom(index % 5 * 100) for index in range(count)] + [b"x" * 3_000_000]
    whole = b"".join(parts)
    got = b""
    rest: list[bytes] | list[memoryview] = parts
    while rest := file.write(rest):
        left = sum(map(len, rest))
        while len(got) < len(whole) - left:
            got += read.read1(len(whole))
        poll = select.poll()
        poll.register(file.waits_at or -1, select.POLLOUT)
        assert poll.poll(30_000)
    while len(got) < len(whole):
        got += read.read1(len(whole))
    assert got == whole
    assert os.get_blocking(write.fileno())


def test_the_kind_of_file(pipe, tmp_path):
    _, write = pipe
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "wb") as tty, os.fdopen(ours, "rb"), (tmp_path / "file").open("wb") as file:
        files = [RawFile(one, "stdout") for one in (write, tty, file, io.BytesIO())]
        assert [file.is_terminal for file in files] == [False, True, False, False]
        assert [file.is_pipe for file in files] == [True, False, False, False]
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
        assert [file.height() for file in files[:3]] == [24, 50, 24]


def test_a_gone_reader_leaves_no_buffered_bytes(pipe):
    read, write = pipe
    file = RawFile(write, "stdout")
    read.close()
    with pytest.raises(BrokenPipeError):
        file.write([b"text"])
    write.flush()


def test_places(tmp_path, pipe):
    _, write = pipe
    with os.fdopen(os.dup(write.fileno()), "wb") as copy, (tmp_path / "file").open("wb") as file:
        assert same_place(RawFile(write, "stdout"), RawFile(copy, "stderr"))
        assert not same_place(RawFile(write, "stdout"), RawFile(file, "stderr"))
    memory = io.BytesIO()
    assert same_place(RawFile(memory, "stdout"), RawFile(memory, "stderr"))
    assert not same_place(RawFile(memory, "stdout"), RawFile(io.BytesIO(), "stderr"))
    assert not same_place(RawFile(memory, "stdout"), RawFile(write, "stderr"))
