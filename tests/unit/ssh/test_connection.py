"""The common contract of all connections: paramiko, the ssh binary, and this machine itself."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import closing

import pytest

from hvlaunch.job import Host
from hvlaunch.ssh import Connection, connect_local
from hvlaunch.ssh.by_openssh import OpenSSHClient
from hvlaunch.ssh.streams import ConnectLimit

from .conftest import PATIENCE, connect, in_thread, read_all

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh binary (openssh-client)")


@pytest.fixture(params=["paramiko", pytest.param("openssh", marks=needs_ssh), "local"])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with closing(_connect(request)) as connection:
        yield connection


def _connect(request: pytest.FixtureRequest) -> Connection:
    if request.param == "local":
        return connect_local(Host("here"))
    sshd = request.getfixturevalue("sshd")
    if request.param == "openssh":
        client = OpenSSHClient(sshd.options(), timeout=PATIENCE, connect_limit=ConnectLimit(1))
        return client.connect(sshd.host())
    return connect(sshd.host(), sshd.options(), timeout=PATIENCE)


def test_bytes_in_both_directions(connection):
    data = os.urandom(8 << 20)
    channel = connection.run(f"head -c {len(data)}")
    thread, ended = in_thread(lambda: channel.write(data))
    assert hashlib.sha256(read_all(channel)).digest() == hashlib.sha256(data).digest()
    thread.join()
    assert ended == [None]
    assert channel.read() == b""
    assert channel.exit_status(PATIENCE) == 0


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 7", 7), ("exec no-such-command", 127)])
def test_exit_status(connection, command, status):
    channel = connection.run(command)
    assert read_all(channel) == b""
    assert channel.exit_status(PATIENCE) == status


def test_a_running_command_has_no_status(connection):
    channel = connection.run("cat")
    assert channel.exit_status(0.01) is None
