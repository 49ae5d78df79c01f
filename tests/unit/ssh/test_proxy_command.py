"""Commands that lead to a host, and end with the connection."""

import socket

import psutil
import pytest

from hvlaunch.errors import ConnectFailed
from hvlaunch.ssh.streams import start_proxy

from .conftest import gone, until


def test_bytes_in_both_directions():
    stream = start_proxy("a", "cat")
    stream.sendall(b"SSH-2.0-x\r\n")
    assert stream.recv(100) == stream.greeting == b"SSH-2.0-x\r\n"
    assert (stream.local_address, stream.remote_address) == ("", "")
    stream.close()


def test_a_command_that_fails_says_why():
    command = "sh -c 'echo one >&2; echo no way out >&2; exit 3'"
    stream = start_proxy("a", command)
    assert stream.recv(1) == b""
    assert stream.problem() == f"its ProxyCommand `{command}` ended with status 3: no way out"
    stream.close()


def test_a_command_that_did_its_work_is_no_problem():
    stream = start_proxy("a", "true")
    assert stream.recv(1) == b""
    assert stream.problem() is None
    stream.close()


@pytest.mark.parametrize(
    "command", ["sleep 600", "sh -c 'sleep 600 & wait'", "sh -c 'trap \"\" TERM; sleep 600; :'"]
)
def test_closing_ends_the_command_with_its_children(command):
    stream = start_proxy("a", command)
    leader = psutil.Process(stream._process.pid)
    until(
        lambda: [p for p in (leader, *leader.children(recursive=True)) if p.name() == "sleep"], "the command"
    )
    processes = [leader, *leader.children(recursive=True)]
    stream.close()
    stream.close()
    until(lambda: all(gone(process) for process in processes), "the command to end")
    assert not psutil.pid_exists(leader.pid)


def test_a_reader_is_unblocked_by_shutdown():
    stream = start_proxy("a", "sleep 600")
    stream.shutdown(socket.SHUT_RDWR)
    assert stream.recv(1) == b""
    stream.close()


def test_a_command_that_can_not_be_one():
    with pytest.raises(ConnectFailed, match="can't be started") as caught:
        start_proxy("a", "nul\0")
    assert caught.value.host == "a"
