"""Resources that a job's hosts share, with either client."""

import subprocess
import sys
from contextlib import closing

import pytest

from hvlaunch.ssh.by_openssh import OpenSSHConnection
from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection
from hvlaunch.ssh.ways import Ways

from .conftest import PATIENCE, read_all


@pytest.mark.parametrize(
    ("client", "kind"), [("paramiko", ParamikoConnection), ("openssh", OpenSSHConnection)]
)
def test_the_requested_client(sshd, client, kind):
    with closing(Ways(sshd.options(client=client), timeout=PATIENCE)) as ways:
        for _ in range(2):
            with closing(ways.connect(sshd.host())) as connection:
                assert isinstance(connection, kind)
                assert read_all(connection.run("echo hello")) == b"hello\n"
        ways.close()


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys; from hvlaunch.job import SSHOptions; from hvlaunch.ssh.ways import Ways;"
        "Ways(SSHOptions(), timeout=1).close();"
        "print([name for name in sys.modules if 'paramiko' in name or name.startswith('hvlaunch.ssh.k')])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        == "[]\n"
    )
