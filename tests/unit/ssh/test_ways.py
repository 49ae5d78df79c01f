"""Resources that a job's hosts share, with either client."""

import subprocess
import sys
from contextlib import closing

import pytest

from hvlaunch.errors import BadUsage
from hvlaunch.gloo import begin_connections, run
from hvlaunch.job import ElasticOptions, Host, JobSpec, SSHOptions
from hvlaunch.ssh import Ways
from hvlaunch.ssh.by_openssh import OpenSSHConnection
from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection
from hvlaunch.ssh.config import AskSSH
from tests.testhosts.places import wait_until

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


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_settings_that_were_asked_for_early_are_not_asked_for_again(sshd, client, monkeypatch):
    asked, ask = [], AskSSH.__call__

    def counting(self, arguments, timeout):
        asked.append(arguments)
        return ask(self, arguments, timeout)

    monkeypatch.setattr(AskSSH, "__call__", counting)
    with closing(Ways(sshd.options(client=client), timeout=PATIENCE)) as ways:
        ways.prepare([sshd.host()])
        wait_until(lambda: asked, "the early question")
        with closing(ways.connect(sshd.host())) as connection:
            assert read_all(connection.run("echo hello")) == b"hello\n"
    assert len(asked) == 1


NAMES = ("localhost", "n1.invalid", "n2.invalid")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["n1.invalid", "n2.invalid"]),
        ({"elastic": ElasticOptions(min_np=1)}, ["n1.invalid"]),
        ({"hosts": (Host("localhost"),)}, []),
        ({"pool": "p"}, []),
        ({"ssh": SSHOptions(remote_agent="rsh")}, []),
    ],
)
def test_a_job_begins_early_with_hosts_that_the_engine_will_ask_for(monkeypatch, more, names):
    prepared: list[str] = []
    monkeypatch.setattr(Ways, "prepare", lambda _self, hosts: prepared.extend(host.name for host in hosts))
    spec = JobSpec(**{"command": ("true",), "hosts": tuple(map(Host, NAMES)), "cwd": "/", **more})
    begin_connections(spec).close()
    assert prepared == names


def test_connections_that_have_begun_are_closed_if_the_job_can_not_start(monkeypatch, tmp_path):
    closed = []
    monkeypatch.setattr(Ways, "prepare", lambda *_: None)
    monkeypatch.setattr(Ways, "close", lambda _self: closed.append(True))
    (tmp_path / "file").touch()
    spec = JobSpec(command=("true",), hosts=(Host("n1.invalid"),), cwd="/", output_dir=tmp_path / "file")
    with pytest.raises(BadUsage):
        run(spec, stdout=None, stderr=None)
    assert closed


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys; from hvlaunch.job import SSHOptions; from hvlaunch.ssh import Ways;"
        "Ways(SSHOptions(), timeout=1).close();"
        "print([name for name in sys.modules if 'paramiko' in name or name.startswith('hvlaunch.ssh.k')])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        == "[]\n"
    )
