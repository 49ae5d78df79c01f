"""Commands on this machine, over the same protocol as on others."""

import gc
import os
import select
from contextlib import closing

import psutil
import pytest

from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.ssh import Tail, connect_local
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, in_thread, read_all


@pytest.fixture
def connection():
    with closing(connect_local(Host("here"))) as connection:
        yield connection


def test_there_is_no_address(connection):
    assert (connection.local_address, connection.remote_address) == (None, None)


@pytest.mark.parametrize(("command", "status"), [("kill -KILL $$", 137), ("kill -TERM $$", 143)])
def test_exit_status_of_a_signal(connection, command, status):
    channel = connection.run(command)
    assert read_all(channel) == b""
    assert channel.exit_status(PATIENCE) == status


def test_the_end_of_stderr_is_kept_and_never_stalls(connection):
    channel = connection.run("head -c 5000000 /dev/zero | tr '\\0' x >&2; echo end >&2; echo done")
    assert read_all(channel) == b"done\n"
    assert channel.exit_status(PATIENCE) == 0
    assert channel.stderr() == b"x" * (16 * 1024 - 4) + b"end\n"


def test_the_terminals_ctrl_c_does_not_reach_it(connection):
    channel = connection.run("echo $$; cat")
    pid = int(channel.read())
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) != os.getpgid(0)


@pytest.mark.parametrize("whose", ["channel", "connection"])
def test_close_unblocks_a_reader_and_ends_stdin(connection, whose):
    channel = connection.run("echo $$; cat; exec sleep 0")
    process = psutil.Process(int(channel.read()))
    thread, ended = in_thread(channel.read)
    (channel if whose == "channel" else connection).close()
    thread.join(PATIENCE)
    assert isinstance(ended[0], OSError)
    wait_until(lambda: not process.is_running(), "the command to end by itself, and its zombie to go")
    assert channel.exit_status(PATIENCE) is not None


def test_close_unblocks_a_writer(connection):
    channel = connection.run("exec sleep 100")
    thread, ended = in_thread(lambda: channel.write(bytes(1 << 20)))
    stdin = channel._stdin._file
    wait_until(lambda: not select.select([], [stdin], [], 0)[1], "the pipe to be full")
    channel.close()
    thread.join(PATIENCE)
    channel._process.kill()
    assert isinstance(ended[0], ConnectionAbortedError)


def test_close_does_not_kill_the_process(connection):
    channel = connection.run("trap '' HUP; echo $$; read line; exec 0<&- 1>&- 2>&-; sleep 0.2; exit 3")
    channel.read()
    channel.close()
    assert channel.exit_status(PATIENCE) == 3


def test_after_close_everything_fails_and_close_may_be_repeated(connection):
    channel = connection.run("cat")
    channel.close()
    channel.close()
    connection.close()
    with pytest.raises(OSError, match="closed"):
        channel.read()
    with pytest.raises(OSError, match="closed"):
        channel.write(b"x")
    assert channel.stderr() == b""


def test_writing_to_an_ended_command(connection):
    channel = connection.run("exit 0")
    assert channel.exit_status(PATIENCE) == 0
    with pytest.raises(OSError, match="Broken pipe"):
        channel.write(b"x")


def test_no_descriptor_stays_open():
    def count() -> int:
        gc.collect()  # what earlier tests have left
        return psutil.Process().num_fds()

    before = count()
    connection = connect_local(Host("here"))
    for _ in range(3):
        channel = connection.run("cat")
        channel.write(b"x")
        assert channel.read() == b"x"
    connection.close()
    assert count() == before


def test_a_command_that_can_not_be_started(connection):
    with pytest.raises(HostError, match="/bin/sh can't be started: embedded null byte") as caught:
        connection.run("echo \0")
    assert caught.value.host == "here"


def test_a_command_gets_the_usual_signals():
    """Python ignores SIGPIPE; what it starts should not."""
    with closing(connect_local(Host("here"))) as connection:
        channel = connection.run("yes | head -1")
        assert read_all(channel) == b"y\n"
        assert channel.exit_status(PATIENCE) == 0
        assert b"roken pipe" not in channel.stderr()


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
