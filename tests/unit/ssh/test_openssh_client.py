"""The ssh binary behind the same protocol: bytes, statuses, errors, ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from typing import Any

import psutil
import pytest

from hvlaunch.errors import (
    ConnectFailed,
    HostError,
    HostKeyChanged,
    HostKeyUnknown,
    PermissionDenied,
    SentAway,
    StartTimeout,
    UnknownHost,
)
from hvlaunch.ssh.by_openssh import OpenSSHClient, OpenSSHConnection
from hvlaunch.ssh.streams import ConnectLimit
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, Sshd, gone, in_thread, keygen, kill_sshds, public, read_all

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh binary (openssh-client)")


def reach(
    sshd: Sshd, *, timeout: float = PATIENCE, host: dict[str, Any] | None = None, **options
) -> OpenSSHConnection:
    connect_limit = ConnectLimit(8, sleep=lambda _: None)
    client = OpenSSHClient(sshd.options(**options), timeout=timeout, connect_limit=connect_limit)
    return client.connect(sshd.host(**host or {}))


def test_no_ssh_outlives_a_driver_that_is_killed():
    """Not even one that does not see the end of its stdin, as while it connects."""
    program = """if True:
        import sys
        from hvlaunch.children import Sweeper
        from hvlaunch.ssh.by_openssh import OpenSSHChannel
        from hvlaunch.ssh import start_piped
        processes = [start_piped(["sleep", "1000"]) for _ in range(3)]
        channels = [OpenSSHChannel(process, sweeper) for sweeper in [Sweeper()] for process in processes]
        channels[1].close()
        print(*[process.pid for process in processes], flush=True)
        sys.stdin.read()
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert [psutil.pid_exists(pid) for pid in pids] == [True, False, True]
        driver.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid) or gone(psutil.Process(pid)), "its end")  # type: ignore[misc]


@pytest.fixture
def connection(sshd):
    with closing(reach(sshd)) as connection:
        yield connection


def test_both_ends_are_known(connection):
    assert (connection.local_address, connection.remote_address) == ("127.0.0.1", "127.0.0.1")


def test_exit_status_of_a_signal(connection):
    channel = connection.run("kill -KILL $$")
    assert read_all(channel) == b""
    assert channel.exit_status(PATIENCE) == 255


def test_the_mark_is_removed_from_the_output(connection):
    """Though ssh itself prints a mark before it."""
    assert read_all(connection.run("echo hello")) == b"hello\n"
    assert read_all(connection.run("printf 'hvlaunch: '; printf 'connected\\n'")) == b"hvlaunch: connected\n"


def test_the_end_of_stderr(connection):
    channel = connection.run("echo early >&2; cat")
    wait_until(lambda: channel.stderr().endswith(b"early\n"), "stderr")
    channel.close()


def test_a_command_line_reaches_the_shell_as_it_is(connection):
    assert read_all(connection.run("echo \"a  b\" '$HOME' \\\\ # comment")) == b"a  b $HOME \\\n"


@pytest.mark.parametrize("whose", ["channel", "connection"])
def test_close_ends_ssh_and_the_command(connection, whose):
    channel = connection.run("echo $$; exec cat")
    command = psutil.Process(int(channel.read()))
    ssh = psutil.Process(channel._process.pid)
    thread, ended = in_thread(channel.read)
    for _ in range(2):
        (channel if whose == "channel" else connection).close()
    thread.join(PATIENCE)
    assert isinstance(ended[0], OSError)
    wait_until(lambda: gone(command), "the command to see the end of its stdin")
    assert gone(ssh)


def test_an_ssh_that_does_not_listen_is_killed(connection):
    channel = connection.run("exec cat")
    os.kill(channel._process.pid, signal.SIGSTOP)
    channel.close()
    assert channel.exit_status(0.0) is not None


def test_a_broken_connection_is_not_the_end_of_output(sshd, connection):
    channel = connection.run("echo before; exec cat")
    assert channel.read() == b"before\n"
    thread, ended = in_thread(channel.read)
    kill_sshds(psutil.Process(sshd.process.pid).children(recursive=True))
    thread.join(PATIENCE)
    assert isinstance(ended[0], ConnectionResetError)
    assert "the connection was lost: " in str(ended[0])


def test_an_ssh_that_somebody_kills_is_no_end_of_the_command(connection):
    channel = connection.run("echo before; exec cat")
    assert channel.read() == b"before\n"
    os.kill(channel._process.pid, signal.SIGKILL)
    with pytest.raises(ConnectionResetError, match="the ssh process on this machine was killed by signal 9"):
        channel.read()


def test_user_settings_that_would_spoil_it_do_not_count(sshd):
    sshd.config += [
        "RequestTTY force",
        "LocalCommand echo spoiled",
        "RemoteCommand echo spoiled",
        "ForwardX11 yes",
    ]
    sshd.config += [
        "PermitLocalCommand no",
        "BatchMode no",
        "ControlMaster auto",
        f"ControlPath {sshd.folder}/cm",
    ]
    try:
        with closing(reach(sshd)) as connection:
            assert read_all(connection.run("tty; true")) == b"not a tty\n"
    finally:
        sshd.config.clear()
    assert not (sshd.folder / "cm").exists()


def test_a_port_that_can_not_be_forwarded_is_no_error(sshd):
    """As where several hosts have the same LocalForward: one connection has it, the others go without."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sshd.config += [f"LocalForward 127.0.0.1:{port} 127.0.0.1:9", "ExitOnForwardFailure yes"]
        try:
            with closing(reach(sshd)) as connection:
                assert read_all(connection.run("echo hello")) == b"hello\n"
        finally:
            sshd.config.clear()


def test_a_shell_of_the_users_that_runs_nothing(sshd, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/false")
    with closing(reach(sshd)) as connection:
        assert read_all(connection.run("echo hello")) == b"hello\n"


# Errors


def refusal(kind: type[HostError], sshd: Sshd, **words) -> HostError:
    with closing(reach(sshd, **words)) as connection, pytest.raises(HostError) as caught:
        connection.run("true")
    assert type(caught.value) is kind, caught.value
    assert "\n" not in str(caught.value)
    return caught.value


def test_no_way_to_the_host(unused):
    refusal(UnknownHost, unused, host={"name": "no-such-host.invalid"})
    assert "Connection refused" in str(refusal(ConnectFailed, unused))


def test_an_sshd_that_closes_at_once(unused, serve):
    tries = []

    def close(peer):
        tries.append(peer)
        peer.close()

    unused.port = serve(close)
    refusal(SentAway, unused)
    assert len(tries) == 10


def test_an_sshd_that_is_silent(unused, serve):
    unused.port = serve(lambda peer: None)
    error = refusal(StartTimeout, unused, timeout=4.0)  # of which the question to ssh -G is a part
    assert "ssh did not connect within 4 s" in str(error)


def test_a_wrong_key(sshd, tmp_path):
    sshd.key.rename(tmp_path / "aside")
    try:
        error = refusal(PermissionDenied, sshd, identity=keygen(tmp_path / "wrong"))
    finally:
        (tmp_path / "aside").rename(sshd.key)
    assert "Permission denied (publickey)" in str(error)


def test_a_host_key_that_is_not_known_or_another(make_sshd):
    sshd = make_sshd(key_types=("ed25519", "ecdsa"))
    sshd.know()
    refusal(HostKeyUnknown, sshd)
    other = keygen(sshd.folder / "other")
    sshd.know(f"{sshd.name} {public(other)}")
    changed = refusal(HostKeyChanged, sshd)
    assert isinstance(changed, HostKeyChanged)
    assert changed.fingerprint is not None
    assert changed.fingerprint.startswith("SHA256:")
    with closing(reach(sshd, host_keys="off")) as connection:
        assert read_all(connection.run("echo hello")) == b"hello\n"


def test_settings_that_can_not_be_used(unused):
    unused.config.append("Foo bar")
    with pytest.raises(HostError, match="Bad configuration option"):
        reach(unused)


def test_no_ssh(unused, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with (
        closing(reach(unused)) as connection,
        pytest.raises(HostError, match=r"ssh can't be started.* install OpenSSH's client"),
    ):
        connection.run("true")


def test_an_ssh_that_is_there_and_can_not_be_started(unused):
    """Here for a word that is too long; for a limit of ours, as a rule. Installing it again would not help."""
    with (
        closing(reach(unused)) as connection,
        pytest.raises(HostError, match="ssh can't be started") as caught,
    ):
        connection.run("x" * 200_000)
    assert "ulimit" in str(caught.value)
