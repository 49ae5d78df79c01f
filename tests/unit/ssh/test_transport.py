import socket
from collections.abc import Iterator

import pytest
from cryptography.exceptions import InvalidTag
from paramiko.ssh_exception import SSHException

from hvlaunch.ssh.by_paramiko.transport import SSHTransport


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
