"""Commands over a real sshd: bytes, statuses, ends. And the errors of paramiko's transport."""

import hashlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import paramiko
import psutil
import pytest
from cryptography.exceptions import InvalidTag
from paramiko.common import AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from paramiko.ssh_exception import SSHException

from hvlaunch.errors import HostError, HostLost, StartTimeout
from hvlaunch.ssh.by_paramiko.connection import SSHTransport
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, connect, gone, in_thread, kill_sshds, read_all


@pytest.fixture
def session_of_sshd(sshd, connection):
    """The sshd process that serves `connection`; needs it to be the only one."""
    listener = psutil.Process(sshd.process.pid)
    wait_until(lambda: len(listener.children()) == 1, "one connection")
    return listener.children()[0]


def test_both_ends_are_known(connection):
    assert (connection.local_address, connection.remote_address) == ("127.0.0.1", "127.0.0.1")


def test_bytes_arrive_on_the_host(connection):
    data = os.urandom(8 << 20)
    channel = connection.run(f"head -c {len(data)} | sha256sum")
    channel.write(data)
    assert read_all(channel).split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_an_answer_does_not_wait_for_delayed_acks(connection):
    """Each would, once the kernel takes the connection for an interactive one; a busy machine is late at times."""
    channel = connection.run("cat")
    times = []
    for _ in range(100):
        started = time.monotonic()
        channel.write(b"x")
        channel.read()
        times.append(time.monotonic() - started)
    assert min(times[50:]) < 0.04  # what one delayed ACK costs


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -XCPU $$", 255),  # a signal that RFC 4254 has no name for
    ],
)
def test_exit_status_of_a_signal(connection, command, status):
    channel = connection.run(command)
    assert read_all(channel) == b""
    assert channel.exit_status(PATIENCE) == status


def test_the_end_of_stderr_is_kept_and_never_stalls(connection):
    """More than the window, with nobody asking for it."""
    channel = connection.run("head -c 9000000 /dev/zero | tr '\\0' x >&2; echo end >&2; echo done")
    assert read_all(channel) == b"done\n"
    assert channel.exit_status(PATIENCE) == 0
    assert channel.stderr() == b"x" * (16 * 1024 - 4) + b"end\n"


def test_stderr_while_the_command_runs(connection):
    channel = connection.run("echo early >&2; cat")
    wait_until(lambda: channel.stderr() == b"early\n", "stderr")


def test_one_command_after_another(connection):
    first = connection.run("cat")
    first.close()
    second = connection.run("echo $((6 * 7))")
    assert read_all(second) == b"42\n"


def test_unread_output_stays_on_the_host(connection):
    """Back-pressure: the command blocks when the window is full."""
    channel = connection.run("head -c 50000000 /dev/zero; echo finished >&2")
    assert channel.read()
    assert channel.exit_status(0.3) is None
    assert channel.stderr() == b""
    read_all(channel)
    assert channel.exit_status(PATIENCE) == 0
    assert channel.stderr() == b"finished\n"


@pytest.mark.parametrize("whose", ["channel", "connection"])
def test_close_unblocks_a_reader_and_ends_the_command(connection, whose):
    channel = connection.run("echo $$; exec cat")
    command = psutil.Process(int(channel.read()))
    thread, ended = in_thread(channel.read)
    (channel if whose == "channel" else connection).close()
    thread.join(PATIENCE)
    assert isinstance(ended[0], OSError)
    wait_until(lambda: gone(command), "the command to see the end of its stdin")


@pytest.mark.parametrize("whose", ["channel", "connection"])
def test_close_unblocks_a_writer(connection, whose):
    channel = connection.run("echo $$; exec sleep 600")
    command = psutil.Process(int(channel.read()))
    thread, ended = in_thread(lambda: channel.write(bytes(64 << 20)))
    wait_until(lambda: channel._session.out_window_size == 0, "the window to be full")
    (channel if whose == "channel" else connection).close()
    thread.join(PATIENCE)
    assert isinstance(ended[0], OSError)
    command.kill()


def test_close_does_not_wait_for_a_stuck_connection(connection, session_of_sshd):
    """The writer waits for TCP here, not for the window, and holds up whatever else would be sent."""
    channel = connection.run("exec cat >/dev/null")
    transport = connection._transport
    transport.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    session_of_sshd.suspend()
    try:
        thread, ended = in_thread(lambda: channel.write(bytes(8 << 20)))
        # Until TCP probes the other end's closed window, it may find some more room.
        wait_until(lambda: not select.select([], [transport.sock], [], 0.5)[1], "TCP to be full for good")
        assert channel._session.out_window_size > 0
        channel.close()
        thread.join(PATIENCE)
        assert isinstance(ended[0], OSError)
    finally:
        session_of_sshd.resume()


def test_after_close_everything_fails_and_close_may_be_repeated(connection):
    channel = connection.run("cat")
    for _ in range(2):
        channel.close()
    with pytest.raises(OSError, match="closed"):
        channel.read()
    with pytest.raises(OSError, match="closed"):
        channel.write(b"x")
    for _ in range(2):
        connection.close()
    channel.close()
    with pytest.raises(HostLost):
        connection.run("true")


def test_writing_to_an_ended_command(connection):
    channel = connection.run("exit 0")
    read_all(channel)
    wait_until(lambda: channel._session.closed, "the host to close the channel")
    with pytest.raises(OSError):
        channel.write(b"x")


def test_a_broken_connection_is_not_the_end_of_output(connection, session_of_sshd):
    channel = connection.run("echo before; exec cat")
    assert channel.read() == b"before\n"
    thread, ended = in_thread(channel.read)
    kill_sshds([*session_of_sshd.children(recursive=True), session_of_sshd])
    thread.join(PATIENCE)
    assert isinstance(ended[0], ConnectionResetError)
    with pytest.raises(ConnectionResetError, match="the connection was lost"):
        channel.read()
    with pytest.raises(OSError):
        channel.write(b"x" * 100_000)
    assert channel.exit_status(0.01) is None
    with pytest.raises(HostLost, match="lost") as caught:
        connection.run("true")
    assert caught.value.host == "127.0.0.1"


def test_output_ends_well_though_the_connection_breaks_later(connection, session_of_sshd):
    channel = connection.run("echo $$; exec >&- 2>&-; exec sleep 600")
    shell = psutil.Process(int(channel.read()))
    assert channel.read() == b""
    session_of_sshd.kill()
    wait_until(lambda: not connection._transport.is_active(), "the connection to break")
    assert channel.read() == b""
    shell.kill()


def test_a_host_that_allows_no_session(make_sshd):
    sshd = make_sshd(words=("MaxSessions 0",))
    connection = connect(sshd.host(), sshd.options(), timeout=PATIENCE)
    try:
        with pytest.raises(HostError, match="its sshd refused to open a session") as caught:
            connection.run("true")
        assert caught.value.host == "127.0.0.1"
    finally:
        connection.close()


@pytest.mark.parametrize("stage", ["check_channel_request", "check_channel_exec_request"])
def test_a_host_that_does_not_take_the_command(sshd, serve, stage):
    """A server that lets us in, and then thinks for ever."""
    done = threading.Event()

    class Server(paramiko.ServerInterface):
        def check_auth_publickey(self, username, key):
            return AUTH_SUCCESSFUL

        def get_allowed_auths(self, username):
            return "publickey"

        def check_channel_request(self, kind, chanid):
            self._think(stage == "check_channel_request")
            return OPEN_SUCCEEDED

        def check_channel_exec_request(self, channel, command):
            self._think(stage == "check_channel_exec_request")
            return True

        def _think(self, long: bool) -> None:
            if long:
                done.wait(PATIENCE)

    transports = []

    def handle(sock) -> None:
        transports.append(paramiko.Transport(sock))
        transports[-1].add_server_key(paramiko.Ed25519Key(filename=str(sshd.folder / "host_ed25519")))
        transports[-1].start_server(event=threading.Event(), server=Server())

    port = serve(handle)
    connection = connect(sshd.host(port=port), sshd.options(host_keys="off"), timeout=PATIENCE)
    connection._timeout = 0.5
    try:
        with pytest.raises(StartTimeout, match=r"its sshd did not start a command within 0\.5 s"):
            connection.run("true")
    finally:
        done.set()
        connection.close()
        for transport in transports:
            transport.join(PATIENCE)
            transport.close()


@pytest.fixture
def transport() -> Iterator[SSHTransport]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = SSHTransport(ours, "a")  # type: ignore[arg-type]  # a socket will do for a stream
        yield transport
        transport.hang_up()


@pytest.mark.parametrize("error", [InvalidTag(), IndexError("index out of range"), ValueError("no such key")])
def test_unexpected_exceptions_of_paramiko_are_the_hosts_fault(
    transport: SSHTransport, error: Exception
) -> None:
    transport.saved_exception = error
    found = transport.get_exception()
    assert isinstance(found, SSHException)
    assert type(error).__name__ in str(found)
    assert found.__cause__ is error


@pytest.mark.parametrize("error", [None, SSHException("no"), EOFError(), ConnectionResetError()])
def test_other_ends_of_a_connection_are_told_as_they_are(
    transport: SSHTransport, error: Exception | None
) -> None:
    transport.saved_exception = error
    assert transport.get_exception() is error
