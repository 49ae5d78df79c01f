"""The socket of another process of ours."""

import socket
import subprocess
import sys

import pytest

from hvlaunch.ssh.streams import borrow

CONNECT = """\
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd_getfd")
def test_a_process_has_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [sys.executable, "-c", CONNECT, str(port)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            borrowed = borrow(process.pid)
            assert borrowed is not None
            with borrowed:
                assert borrowed.getpeername() == ("127.0.0.1", port)
                assert not borrowed.get_inheritable()
            with server.accept()[0] as accepted:
                process.kill()
                assert accepted.recv(1) == b""  # nothing of ours keeps it open


def test_a_process_without_a_tcp_socket() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert borrow(process.pid) is None
        process.kill()


def test_an_unknown_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert borrow(process.pid) is None
