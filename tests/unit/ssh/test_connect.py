"""Connecting to a real sshd: who gets in, and what is said to those who do not."""

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.errors import (
    ConnectFailed,
    HostError,
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnknown,
    PermissionDenied,
    SentAway,
    StartTimeout,
    UnknownHost,
)
from hvlaunch.job import Host
from hvlaunch.ssh.keys import Keyring
from hvlaunch.ssh.paramiko_client import ParamikoClient
from hvlaunch.ssh.turns import Turns

from .conftest import PATIENCE, Sshd, connect, free_port, in_thread, keygen, public, read_all, until, user

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


def answer(sshd: Sshd, *, keyring: Keyring | None = None, host: dict | None = None, **options) -> str:
    """What `echo hello` on the host says."""
    connection = connect(sshd.host(**host or {}), sshd.options(**options), timeout=PATIENCE, keyring=keyring)
    with closing(connection):
        return read_all(connection.run("echo hello")).decode().strip()


def refusal(error: type[HostError], sshd: Sshd, *, host: dict | None = None, timeout=PATIENCE, **options):
    """The error of connecting, which is one line and names the host."""
    with pytest.raises(error) as caught:
        connect(sshd.host(**host or {}), sshd.options(**options), timeout=timeout)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("host 127.0.0.1: ") or host
    return caught.value


@pytest.fixture
def unused(tmp_path):
    """An sshd that is not started: for those who never get to one."""
    sshd = Sshd(tmp_path)
    keygen(sshd.key)
    sshd.port = free_port()
    return sshd


# Getting in


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


def test_a_certificate_gets_in_where_its_key_does_not(make_sshd, tmp_path):
    authority = keygen(tmp_path / "ca")
    sshd = make_sshd(words=(f"TrustedUserCAKeys {authority}.pub",))
    key = keygen(tmp_path / "k")
    words = ["-s", authority, "-I", "me", "-n", user(), f"{key}.pub"]
    subprocess.run(["ssh-keygen", "-q", *words], check=True)
    assert answer(sshd, identity=key) == "hello"


def test_a_key_gets_in_though_its_certificate_does_not(sshd, tmp_path):
    authority, key = keygen(tmp_path / "ca"), keygen(tmp_path / "k")
    sshd.authorize(key)
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "x", f"{key}.pub"], check=True)
    assert answer(sshd, identity=key) == "hello"


def test_a_host_that_wants_two_keys_gets_two(make_sshd, tmp_path):
    sshd = make_sshd(words=("AuthenticationMethods publickey,publickey",))
    second = keygen(tmp_path / "second")
    sshd.authorize(second)
    assert answer(sshd, identity=second) == "hello"


def test_fifty_at_once_read_everything_once(sshd, monkeypatch):
    reads = []
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda p: reads.append(str(p)) or read_bytes(p))
    monkeypatch.setattr(Path, "read_text", lambda p, **words: reads.append(str(p)) or read_text(p, **words))
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
    assert reads.count(str(sshd.key)) == 1
    assert reads.count(str(sshd.known_hosts)) == 1


# No way to the host


def test_an_unknown_name(unused):
    error = refusal(UnknownHost, unused, host={"name": "no-such-host.invalid"})
    assert str(error).startswith("host no-such-host.invalid: the name no-such-host.invalid resolves to no")


def test_refused(unused):
    assert "Connection refused" in str(refusal(ConnectFailed, unused))


def test_a_server_that_closes_at_once(unused, serve):
    tries = []
    unused.port = serve(lambda peer: (tries.append(None), peer.close()))
    assert "closed the connection before it said anything" in str(refusal(SentAway, unused))
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
def test_a_server_that_says_something_else(unused, serve, greeting):
    def handle(peer: socket.socket) -> None:
        peer.sendall(greeting)
        peer.shutdown(socket.SHUT_WR)

    unused.port = serve(handle)
    message = str(refusal(ConnectFailed, unused))
    assert f"127.0.0.1 port {unused.port} is no SSH server, or sends us away; it says: " in message
    assert greeting.split(b"\r")[0].decode() in message


@pytest.mark.parametrize("greeting", [b"SSH-1.5-old\r\n", b"SSH-2.0-x\r\n\xff\xff\xff\xffgarbage" * 9])
def test_a_server_that_speaks_another_ssh(unused, serve, greeting):
    unused.port = serve(lambda peer: peer.sendall(greeting))
    assert "no SSH handshake with 127.0.0.1" in str(refusal(ConnectFailed, unused))


def test_a_server_that_shares_no_algorithm(make_sshd):
    sshd = make_sshd(words=("Ciphers chacha20-poly1305@openssh.com",))
    assert "no SSH handshake with 127.0.0.1" in str(refusal(ConnectFailed, sshd))


@pytest.mark.parametrize(
    ("greeting", "said"),
    [(b"", "takes connections but says nothing"), (b"SSH-2.0-x\r\n", "did not finish the SSH handshake")],
)
def test_a_silent_server(unused, serve, greeting, said):
    unused.port = serve(lambda peer: peer.sendall(greeting))
    started = time.monotonic()
    error = refusal(StartTimeout, unused, timeout=1.0)
    assert 0.9 <= time.monotonic() - started < PATIENCE
    assert f"127.0.0.1 port {unused.port} {said} within 1 s" in str(error)


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
    assert f"ended with status 4, and said: {user()} wants 127.0.0.1:{unused.port}" in str(error)


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
        client = ParamikoClient(sshd.options(), timeout=PATIENCE, keyring=keyring, turns=Turns(8))
        host = Host("target", address="127.0.0.1")
        connection = client.connect(host)
        assert (connection.local_address, connection.remote_address) == ("127.0.0.1", "127.0.0.1")
        assert read_all(connection.run("head -c 5000000 /dev/zero")) == bytes(5_000_000)
        other = client.connect(host)
        connection.close()
        assert read_all(other.run("echo hello")) == b"hello\n"
        channel = other.run("cat")
        thread, ended = in_thread(channel.read)
        client.close()
        thread.join(PATIENCE)
        assert isinstance(ended[0], OSError)
        other.close()
        third = client.connect(host)
        assert read_all(third.run("echo again")) == b"again\n"
        third.close()
        client.close()


def test_a_jump_host_that_does_not_let_us_through(sshd, gate):
    sshd.config.append("Match originalhost target\n  ProxyJump gate\nMatch all")
    with contextlib.closing(Keyring()) as keyring:
        client = ParamikoClient(sshd.options(), timeout=PATIENCE, keyring=keyring, turns=Turns(8))
        with pytest.raises(ConnectFailed) as caught:
            client.connect(Host("target", address="127.0.0.1", port=free_port()))
        assert "host target: its jump host gate does not connect to 127.0.0.1 port" in str(caught.value)
        assert "Connect failed" in str(caught.value) or "Connection refused" in str(caught.value)
        client.close()


def test_a_jump_host_that_refuses_our_key(sshd, gate):
    sshd.config.append("Match originalhost target\n  ProxyJump gate\nMatch all")
    (gate.folder / "authorized").write_text("")
    error = refusal(PermissionDenied, sshd, host={"name": "target", "address": "127.0.0.1"})
    assert str(error).startswith("host target: its jump host gate: permission denied")


def test_an_own_configuration_that_is_not_there(sshd):
    assert "No such file" in str(refusal(HostError, sshd, config=Path("/nowhere")))


# Our keys


def test_a_wrong_key(sshd, tmp_path):
    key = keygen(tmp_path / "wrong")
    sshd.key.rename(tmp_path / "aside")
    try:
        error = refusal(PermissionDenied, sshd, identity=key)
    finally:
        (tmp_path / "aside").rename(sshd.key)
    assert error.tried == (str(key),)
    message = str(error)
    assert f"permission denied (publickey) for user {user()}; tried 1 key: {key}" in message
    assert f"-p {sshd.port} -i {key} {user()}@127.0.0.1" in error.hint


def test_no_key(unused, make_sshd):
    sshd = make_sshd()
    sshd.key.unlink()
    error = refusal(PermissionDenied, sshd)
    assert "there is no key to try" in str(error)
    assert error.tried == ()


def test_an_encrypted_key_without_an_agent(make_sshd, tmp_path):
    sshd = make_sshd()
    sshd.key.unlink()
    keygen(sshd.key, passphrase="secret")
    error = refusal(PermissionDenied, sshd)
    assert f"{sshd.key}: encrypted, and no agent holds it" in str(error)
    assert "secret" not in str(error)


def test_an_encrypted_key_that_was_asked_for_leaves_the_others(sshd, tmp_path):
    assert answer(sshd, identity=keygen(tmp_path / "k", passphrase="secret")) == "hello"


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "there is no such file"), ("nonsense", "it is not an RSA, ECDSA or Ed25519 private key")],
)
def test_a_key_that_was_asked_for_and_can_not_be_used(sshd, tmp_path, content, problem):
    key = tmp_path / "k"
    if content is not None:
        key.write_text(content)
    error = refusal(HostError, sshd, identity=key)
    assert f"the private key {key} can't be used: {problem}" in str(error)
    error = refusal(HostError, sshd, host={"identity": str(key)})
    assert str(key) in str(error)


def test_too_many_wrong_keys(make_sshd, tmp_path):
    sshd = make_sshd(words=("MaxAuthTries 2",))
    wrong = [keygen(tmp_path / f"k{i}") for i in range(3)]
    sshd.config += [f"IdentityFile {key}" for key in wrong]
    error = refusal(PermissionDenied, sshd)
    assert "Too many authentication failures" in str(error)
    assert error.tried == tuple(map(str, wrong[:2]))


def test_a_host_that_wants_more_than_a_key(make_sshd):
    sshd = make_sshd(words=("PasswordAuthentication yes", "AuthenticationMethods publickey,password"))
    message = str(refusal(PermissionDenied, sshd))
    assert f"the key {sshd.key} is accepted, but it also wants password" in message


def test_a_host_that_takes_no_keys(make_sshd):
    sshd = make_sshd(words=("PubkeyAuthentication no", "PasswordAuthentication yes"))
    sshd.config.append(f"IdentityFile {keygen(sshd.folder / 'another')}")
    error = refusal(PermissionDenied, sshd)
    assert "permission denied (password)" in str(error)
    assert len(error.tried) == 1


# The ssh agent


@pytest.fixture
def agent(tmp_path):
    """The socket of a real ssh-agent, and a way to give it keys."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("needs ssh-agent (Debian: openssh-client)")
    path = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)

    def add(key: Path) -> None:
        asker = tmp_path / "asker"
        asker.write_text("#!/bin/sh\necho secret\n")
        asker.chmod(0o700)
        words = {
            "SSH_AUTH_SOCK": str(path),
            "SSH_ASKPASS": str(asker),
            "SSH_ASKPASS_REQUIRE": "force",
            "DISPLAY": "x",
        }
        subprocess.run(["ssh-add", "-q", key], env={**os.environ, **words}, check=True)

    until(path.exists, "ssh-agent")
    yield path, add
    process.terminate()
    process.wait()


@pytest.fixture
def locked(make_sshd, tmp_path):
    """An sshd that only takes a key which lies encrypted in the user's configuration."""
    sshd = make_sshd()
    (sshd.folder / "authorized").write_text("")
    sshd.key.unlink()
    sshd.authorize(keygen(sshd.key, passphrase="secret"))
    return sshd


def test_an_agent_holds_the_encrypted_key(locked, agent):
    path, add = agent
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    assert answer(locked) == "hello"


def test_the_keys_of_an_agent_that_no_configuration_names(sshd, agent, tmp_path):
    path, add = agent
    key = keygen(tmp_path / "k")
    sshd.authorize(key)
    add(key)
    sshd.config = [f"IdentityAgent {path}"]
    with closing(Keyring()) as keyring:
        sshd.key.rename(tmp_path / "aside")
        try:
            assert answer(sshd, keyring=keyring) == "hello"
            sshd.config.append("IdentitiesOnly yes")
            with pytest.raises(PermissionDenied) as caught:
                answer(sshd, keyring=keyring)
        finally:
            (tmp_path / "aside").rename(sshd.key)
            sshd.config = []
    assert caught.value.tried == ()


def test_keys_of_the_configuration_come_before_the_agents_others(locked, agent, tmp_path):
    """As sshd gives up after a few, an agent full of keys would otherwise lock us out."""
    path, add = agent
    for i in range(8):
        add(keygen(tmp_path / f"other{i}"))
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    assert answer(locked) == "hello"


def test_the_key_that_was_asked_for_comes_before_the_agents_others(sshd, agent, tmp_path):
    path, add = agent
    for i in range(8):
        add(keygen(tmp_path / f"other{i}"))
    key = keygen(tmp_path / "k")
    sshd.authorize(key)
    sshd.config.append(f"IdentityAgent {path}")
    try:
        assert answer(sshd, identity=key) == "hello"
    finally:
        sshd.config.clear()


def test_fifty_threads_share_one_agent(locked, agent):
    path, add = agent
    add(locked.key)
    locked.config.append(f"IdentityAgent {path}")
    options, said = locked.options(), []
    with closing(Keyring()) as keyring:

        def work() -> None:
            with closing(connect(locked.host(), options, timeout=60, keyring=keyring)) as connection:
                said.append(read_all(connection.run("echo hello")))

        threads = [threading.Thread(target=work) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert said == [b"hello\n"] * 50


def test_an_agent_that_is_gone_is_named(locked):
    locked.config.append(f"IdentityAgent {locked.folder}/gone")
    assert f"no ssh agent answers at {locked.folder}/gone" in str(refusal(PermissionDenied, locked))


# The host's keys


@pytest.fixture(scope="module")
def three(sshd_folder):
    """An sshd with three host keys."""
    (sshd_folder / "three").mkdir()
    sshd = Sshd(sshd_folder / "three", key_types=("ed25519", "ecdsa", "rsa"))
    sshd.start()
    yield sshd
    sshd.stop()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_host_of_which_one_key_of_three_is_known(three, kind):
    three.know(f"{three.name} {three.host_key(kind)}")
    assert answer(three) == "hello"


def test_an_unknown_host(three):
    three.know()
    error = refusal(HostKeyUnknown, three)
    assert type(error) is HostKeyUnknown
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", three.folder / "host_ed25519"], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    assert (error.key_type, error.fingerprint) == ("ssh-ed25519", fingerprint)
    assert fingerprint in str(error)
    assert three.known_hosts.read_text() == ""


def test_what_the_hint_says_makes_the_host_known(three):
    """ssh-keyscan, or ssh once; here with ssh, which writes the file that we read."""
    three.know()
    error = refusal(HostKeyUnknown, three)
    command = error.hint.split("`")[3].split()
    subprocess.run([*command, "-oBatchMode=yes", "-oStrictHostKeyChecking=accept-new", "true"], check=True)
    assert answer(three) == "hello"


def test_a_host_key_by_port_and_by_name(three):
    three.know(f"127.0.0.1 {three.host_key('rsa')}")
    assert answer(three) == "hello"
    three.know(f"[127.0.0.1]:{three.port + 1} {three.host_key('rsa')}")
    refusal(HostKeyUnknown, three)


def test_a_changed_host_key(three):
    three.know("# comment", f"{three.name} {public(three.key)}")
    for policy in ("strict", "accept-new"):
        error = refusal(HostKeyChanged, three, host_keys=policy)
        assert f"{three.known_hosts}:2" in str(error)
    assert answer(three, host_keys="off") == "hello"
    assert len(three.known_hosts.read_text().splitlines()) == 2


def test_accept_new(make_sshd):
    sshd = make_sshd()
    shutil.rmtree(sshd.known_hosts.parent)
    assert answer(sshd, host_keys="accept-new") == "hello"
    assert sshd.known_hosts.read_text() == f"{sshd.name} {sshd.host_key('ed25519')}\n"
    assert answer(sshd) == "hello"
    config = sshd.options().config
    ssh = ["ssh", "-F", config, "-p", str(sshd.port), "-oStrictHostKeyChecking=yes", "-oBatchMode=yes"]
    subprocess.run([*ssh, "127.0.0.1", "true"], check=True)


def test_a_revoked_host_key(three):
    three.know(f"{three.name} {three.host_key('ed25519')}", f"@revoked * {three.host_key('ed25519')}")
    for policy in ("strict", "accept-new", "off"):
        refusal(HostKeyRevoked, three, host_keys=policy)


def test_a_hashed_entry(three):
    three.know(f"{three.name} {three.host_key('ecdsa')}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", three.known_hosts], check=True, capture_output=True)
    assert "127.0.0.1" not in three.known_hosts.read_text()
    assert answer(three) == "hello"
