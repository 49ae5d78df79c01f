"""Resources that a job's hosts share, with either client."""

import subprocess
import sys
from contextlib import closing

import pytest

from hvlaunch.driver.program.keys import Keys
from hvlaunch.gloo.controller import by_ssh
from hvlaunch.job import Host, JobSpec
from hvlaunch.ssh.by_openssh import OpenSSHConnection
from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection
from hvlaunch.ssh.config.ask_ssh import AskSSH
from hvlaunch.ssh.ways import Ways

from .conftest import PATIENCE, read_all, until


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


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_settings_that_were_asked_for_early_are_not_asked_for_again(sshd, client, monkeypatch):
    asked, ask = [], AskSSH.__call__

    def counting(self, arguments, timeout):
        asked.append(arguments)
        return ask(self, arguments, timeout)

    monkeypatch.setattr(AskSSH, "__call__", counting)
    with closing(Ways(sshd.options(client=client), timeout=PATIENCE)) as ways:
        ways.prepare(sshd.host())
        until(lambda: asked, "the early question")
        with closing(ways.connect(sshd.host())) as connection:
            assert read_all(connection.run("echo hello")) == b"hello\n"
    assert len(asked) == 1


def test_a_job_asks_early_for_its_first_host_elsewhere(monkeypatch):
    prepared = []
    monkeypatch.setattr(Ways, "prepare", lambda _self, host: prepared.append(host.name))
    for names in (["localhost", "n1.invalid", "n2.invalid"], ["localhost"], []):
        spec = JobSpec(command=("true",), hosts=tuple(map(Host, names)), cwd="/")
        with by_ssh(spec, Keys.new(), print):
            pass
    assert prepared == ["n1.invalid"]


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
