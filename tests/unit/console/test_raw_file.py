import fcntl
import io
import os
import struct
import termios
import threading

import pytest

from hvlaunch.console.raw_file import RawFile, same_place


def test_a_file_in_memory():
    file = io.BytesIO()
    RawFile(file, "stdout").write(b"text")
    assert file.getvalue() == b"text"


def test_what_was_buffered_comes_first(pipe):
    read, write = pipe
    write.write(b"before ")
    RawFile(write, "stdout").write(b"after\n")
    assert read.readline() == b"before after\n"


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
def test_all_is_written_to_a_slow_reader(pipe, blocking):
    read, write = pipe
    os.set_blocking(write.fileno(), blocking)
    data = os.urandom(1 << 20)
    writer = threading.Thread(target=RawFile(write, "stdout").write, args=[data])
    writer.start()
    assert read.read(len(data)) == data
    writer.join()


@pytest.mark.parametrize("count", [1, 7, 5000])
def test_many_parts_arrive_in_order(pipe, count):
    read, write = pipe
    parts = [os.urandom(index % 5 * 100) for index in range(count)]
    writer = threading.Thread(target=RawFile(write, "stdout").write, args=parts)
    writer.start()
    assert read.read(sum(map(len, parts))) == b"".join(parts)
    writer.join()


def test_what_it_is(pipe, tmp_path):
    _, write = pipe
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "wb") as tty, os.fdopen(ours, "rb"), (tmp_path / "file").open("wb") as file:
        files = [RawFile(one, "stdout") for one in (write, tty, file, io.BytesIO())]
        assert [file.is_terminal for file in files] == [False, True, False, False]
        assert [file.is_pipe for file in files] == [True, False, False, False]
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
        assert [file.height() for file in files[:3]] == [24, 50, 24]


def test_a_gone_reader_leaves_nothing_that_fails_again(pipe):
    read, write = pipe
    file = RawFile(write, "stdout")
    read.close()
    with pytest.raises(BrokenPipeError):
        file.write(b"text")
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
