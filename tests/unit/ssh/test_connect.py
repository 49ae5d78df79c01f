"""Connecting to a real sshd: who gets in, and what is said to those who do not."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from hvlaunch.errors import (
    ConnectFailed,
    HostError,
    PermissionDenied,
    SentAway,
    StartTimeout,
    UnknownHost,
)
from hvlaunch.job import Host
from hvlaunch.ssh import listen
from hvlaunch.ssh.by_paramiko import ParamikoClient
from hvlaunch.ssh.by_paramiko.login import Login
from hvlaunch.ssh.config import AskSSH, LoginTarget, Questions, resolve
from hvlaunch.ssh.keyring import Keyring
from hvlaunch.ssh.streams import ConnectLimit, GreetingSocket
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, answer, connect, free_port, gone, in_thread, keygen, read_all, refusal, user

CAT = (
    sys.executable
    + ' -c "'
    + (
        "import os,socket,sys,threading;s=socket.create_connection((sys.argv[1],int(sys.argv[2])));"
        "t=threading.Thread(target=lambda:[s.sendall(d) for d in iter(lambda:os.read(0,65536),b'')],daemon=True);t.start();"
        "[os.write(1,d) for d in iter(lambda:s.recv(65536),b'')]"
    )
    + '"'
)
"""A ProxyCommand that needs no netcat."""


# Getting in


def test_a_listener_hears_only_its_own_threads_stages(sshd):
    told: list[str] = []

    def connect_and_listen():
        listen(told.append)
        answer(sshd)

    for target in (connect_and_listen, lambda: answer(sshd)):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join(PATIENCE)
    assert told == ["resolve", "connect", "log in"]


def test_a_command_runs(sshd):
    assert answer(sshd) == "hello"


@pytest.mark.parametrize("kind", ["rsa", "ecdsa", "ed25519"])
def test_every_kind_of_key_gets_in(sshd, tmp_path, kind):
    key = keygen(tmp_path / "k", kind)
    sshd.authorize(key)
    assert answer(sshd, identity=key) == "hello"


def test_a_hosts_own_words(sshd):
    host = {
        "name": "node",
        "address": "127.0.0.1",
        "port": sshd.port,
        "user": user(),
        "identity": str(sshd.key),
    }
    assert answer(sshd, host=host, port=1, user="nobody", identity=Path("/nowhere")) == "hello"


def test_a_certificate_is_accepted_though_its_key_is_not(make_sshd, tmp_path):
    authority = keygen(tmp_path / "ca")
    sshd = make_sshd(words=(f"TrustedUserCAKeys {authority}.pub",))
    key = keygen(tmp_path / "k")
    words: list[str | Path] = ["-s", authority, "-I", "me", "-n", user(), f"{key}.pub"]
    subprocess.run(["ssh-keygen", "-q", *words], check=True)
    assert answer(sshd, identity=key) == "hello"


def test_a_key_gets_in_though_its_certificate_does_not(sshd, tmp_path):
    authority, key = keygen(tmp_path / "ca"), keygen(tmp_path / "k")
    sshd.authorize(key)
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "x", f"{key}.pub"], check=True)
    assert answer(sshd, identity=key) == "hello"


def test_a_host_may_require_two_keys(make_sshd, tmp_path):
    sshd = make_sshd(words=("AuthenticationMethods publickey,publickey",))
    second = keygen(tmp_path / "second")
    sshd.authorize(second)
    assert answer(sshd, identity=second) == "hello"


def test_fifty_at_once_read_everything_once(sshd, monkeypatch):
    reads: list[str] = []
    opened: list[str] = []

    def noted(paths, read):
        def note(path, *words, **more):
            paths.append(str(path))
            return read(path, *words, **more)

        return note

    monkeypatch.setattr(Path, "open", noted(opened, Path.open))
    monkeypatch.setattr(Path, "read_bytes", noted(reads, Path.read_bytes))
    monkeypatch.setattr(Path, "read_text", noted(reads, Path.read_text))
    options, keyring, failures = sshd.options(), Keyring(), []
    ready = threading.Barrier(50)

    def work(name: str) -> None:
        ready.wait()
        try:
            host = Host(name, address="127.0.0.1")
            with closing(connect(host, options, timeout=60, keyring=keyring)) as connection:
                channel = connection.run(f"echo {name}")
                assert read_all(channel).decode().split() == [name]
                assert channel.exit_status(PATIENCE) == 0
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"n{i}",)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert opened.count(str(sshd.key)) == 1
    assert reads.count(str(sshd.known_hosts)) == 1


# No way to the host


def test_an_unknown_name(unused):
    error = refusal(UnknownHost, unused, host={"name": "no-such-host.invalid"})
    assert str(error).startswith("host no-such-host.invalid: the name no-such-host.invalid can't be resolved")


def test_refused(unused):
    assert "Connection refused" in str(refusal(ConnectFailed, unused))


def test_a_server_that_closes_at_once(unused, serve):
    tries = []

    def close(peer):
        tries.append(peer)
        peer.close()

    unused.port = serve(close)
    assert "closed the connection before it sent anything" in str(refusal(SentAway, unused))
    assert len(tries) == 10


def test_a_server_that_is_busy_for_a_while(sshd, serve):
    """Its first four clients are sent away, each in another way."""
    moods = iter([b"", b"Exceeded MaxStartups\r\n", b"Not allowed at this time\r\n", b""])

    def handle(peer: socket.socket) -> None:
        mood = next(moods, None)
        if mood is not None:
            peer.sendall(mood)
            peer.close()
            return
        onward = socket.create_connection(("127.0.0.1", sshd.port))
        for ends in ((peer, onward), (onward, peer)):
            threading.Thread(target=_pass_on, args=ends, daemon=True).start()

    port = serve(handle)
    assert answer(sshd, host={"port": port}, host_keys="off") == "hello"


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"Exceeded MaxStartups\r\n"])
def test_a_server_of_another_protocol(unused, serve, greeting):
    def handle(peer: socket.socket) -> None:
        peer.sendall(greeting)
        peer.shutdown(socket.SHUT_WR)

    unused.port = serve(handle)
    message = str(refusal(ConnectFailed, unused))
    assert f"127.0.0.1 port {unused.port} is not an SSH server, or refuses this machine; it sent: " in message
    assert greeting.split(b"\r")[0].decode() in message


@pytest.mark.parametrize("greeting", [b"SSH-1.5-old\r\n", b"SSH-2.0-x\r\n\xff\xff\xff\xffgarbage" * 9])
def test_a_server_that_speaks_another_ssh(unused, serve, greeting):
    unused.port = serve(lambda peer: peer.sendall(greeting))
    assert f"the SSH handshake with 127.0.0.1 port {unused.port} failed" in str(
        refusal(ConnectFailed, unused)
    )


def test_a_server_that_shares_no_algorithm(make_sshd):
    sshd = make_sshd(words=("Ciphers chacha20-poly1305@openssh.com",))
    assert f"the SSH handshake with 127.0.0.1 port {sshd.port} failed" in str(refusal(ConnectFailed, sshd))


@pytest.mark.parametrize(
    ("greeting", "said"),
    [(b"", "accepts connections but sends no data"), (b"SSH-2.0-x\r\n", "did not finish the SSH handshake")],
)
def test_a_silent_server(unused, serve, greeting, said):
    unused.port = serve(lambda peer: peer.sendall(greeting))
    started = time.monotonic()
    error = refusal(StartTimeout, unused, timeout=4.0)  # a busy machine comes so far, too
    assert time.monotonic() - started >= 3.9
    assert f"127.0.0.1 port {unused.port} {said} within 4 s" in str(error)


def test_nothing_reaches_stderr(unused, serve, capfd):
    """Even where the user of hvlaunch logs everything to stderr."""
    unused.port = serve(lambda peer: (peer.sendall(b"\xff\xfe nonsense\n" * 200), peer.close()))
    handler = logging.StreamHandler()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        refusal(ConnectFailed, unused)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert capfd.readouterr() == ("", "")


def test_a_proxy_command(sshd):
    sshd.config.append(f"ProxyCommand {CAT} %h %p")
    try:
        with closing(connect(sshd.host(), sshd.options(), timeout=PATIENCE)) as connection:
            assert (connection.local_address, connection.remote_address) == ("", "")
            assert read_all(connection.run("echo hello")) == b"hello\n"
    finally:
        sshd.config.clear()


def test_a_proxy_command_that_fails(unused):
    unused.config.append("ProxyCommand sh -c 'echo %r wants %h:%p >&2; exit 4'")
    error = refusal(ConnectFailed, unused)
    assert f"ended with status 4: {user()} wants 127.0.0.1:{unused.port}" in str(error)


def test_close_ends_a_pending_proxy_command(unused):
    """It may not look at its stdin, as an `ssh -W` whose gate does not answer."""
    unused.config.append(f"ProxyCommand sh -c 'echo $$ > {unused.folder}/pid; exec sleep 600'")
    client = ParamikoClient(
        unused.options(), timeout=PATIENCE, keyring=Keyring, connect_limit=ConnectLimit(8)
    )
    thread, ended = in_thread(lambda: client.connect(unused.host()))
    pid = unused.folder / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the ProxyCommand to run")
    command = psutil.Process(int(pid.read_text()))
    for _ in range(2):
        client.close()
    assert gone(command)
    thread.join(PATIENCE)
    assert isinstance(ended[0], ConnectFailed)
    with pytest.raises(ConnectFailed, match="hvlaunch stopped connecting"):
        client.connect(unused.host())


def test_a_connection_that_is_closed_before_the_login_begins(unused):
    """As close() may do to that of a ProxyCommand."""
    near, far = socket.socketpair()
    with far, GreetingSocket(fileno=near.detach()) as stream:
        stream.close()
        settings = resolve(unused.host(), unused.options(), timeout=PATIENCE, ask=Questions(AskSSH()))
        deadline = time.monotonic() + PATIENCE
        login = Login(
            LoginTarget("a", settings, ""), "strict", Keyring(), timeout=PATIENCE, deadline=deadline
        )
        with pytest.raises(ConnectFailed, match="was closed"):
            login.over(stream)  # type: ignore[arg-type]  # it will do for a stream


def test_a_proxy_command_that_meets_a_full_sshd(unused):
    unused.config.append("ProxyCommand sh -c 'echo kex_exchange_identification: closed >&2; exit 255'")
    refusal(SentAway, unused)


@pytest.fixture
def gate(make_sshd, sshd):
    """A jump host, which `sshd` is behind."""
    gate = make_sshd()
    known = sshd.known_hosts.read_text()
    sshd.know(*known.splitlines(), f"{gate.name} {gate.host_key('ed25519')}")
    sshd.config += [
        "Match originalhost gate",
        f"  IdentityFile {gate.key}",
        "  HostName 127.0.0.1",
        f"  Port {gate.port}",
    ]
    sshd.config += ["Match all"]
    yield gate
    sshd.config.clear()
    sshd.know(*known.splitlines())


def test_a_jump_host(sshd, gate):
    sshd.config.append("Match originalhost target\n  ProxyJump gate\nMatch all")
    with contextlib.closing(Keyring()) as keyring:
        client = ParamikoClient(
            sshd.options(), timeout=PATIENCE, keyring=lambda: keyring, connect_limit=ConnectLimit(8)
        )
        host = Host("target", address="127.0.0.1")
        connection = client.connect(host)
        assert (connection.local_address, connection.remote_address) == ("127.0.0.1", "127.0.0.1")
        assert read_all(connection.run("head -c 5000000 /dev/zero")) == bytes(5_000_000)
        other = client.connect(host)
        connection.close()
        assert read_all(other.run("echo hello")) == b"hello\n"
        channel = other.run("cat")
        thread, ended = in_thread(channel.read)
        client._jumps.close()  # as if the jump host had gone
        thread.join(PATIENCE)
        assert isinstance(ended[0], OSError)
        other.close()
        third = client.connect(host)
        assert read_all(third.run("echo again")) == b"again\n"
        third.close()
        client.close()


def test_a_jump_host_that_forbids_forwarding(sshd, gate):
    sshd.config.append("Match originalhost target\n  ProxyJump gate\nMatch all")
    with contextlib.closing(Keyring()) as keyring:
        client = ParamikoClient(
            sshd.options(), timeout=PATIENCE, keyring=lambda: keyring, connect_limit=ConnectLimit(8)
        )
        with pytest.raises(ConnectFailed) as caught:
            client.connect(Host("target", address="127.0.0.1", port=free_port()))
        assert "host target: its jump host gate can't connect to 127.0.0.1 port" in str(caught.value)
        assert "Connect failed" in str(caught.value) or "Connection refused" in str(caught.value)
        client.close()


def test_a_jump_host_that_refuses_our_key(sshd, gate):
    sshd.config.append("Match originalhost target\n  ProxyJump gate\nMatch all")
    (gate.folder / "authorized").write_text("")
    error = refusal(PermissionDenied, sshd, host={"name": "target", "address": "127.0.0.1"})
    assert str(error).startswith("host target: its jump host gate: permission denied")


def test_a_missing_configuration_file(sshd):
    assert "No such file" in str(refusal(HostError, sshd, config=Path("/nowhere")))
