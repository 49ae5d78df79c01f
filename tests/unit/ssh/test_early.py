"""Connections that are begun before the job asks for them: used once, closed otherwise, and errors as without them."""

import contextlib
import socket
import threading
import time
from contextlib import closing

import pytest

from hvlaunch.errors import HostError
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh import tcp
from hvlaunch.ssh.by_paramiko import ParamikoClient
from hvlaunch.ssh.config import resolve
from hvlaunch.ssh.config.ask_ssh import AskSSH
from hvlaunch.ssh.early import EarlyStarts
from hvlaunch.ssh.tcp import ConnectLimit, Dialed, dial_early
from hvlaunch.ssh.trust.keyring import Keyring

from .conftest import PATIENCE, free_port, read_all, until


class Door:
    """A listener that counts who comes, and who has gone. `answer` gets each connection."""

    def __init__(self) -> None:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        self.port = self.listener.getsockname()[1]
        self.peers: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.peers.append(self.listener.accept()[0])

    def has_lost(self, number: int) -> bool:
        """True if that peer has closed its end; it never sends anything here."""
        if number >= len(self.peers):
            return False
        self.peers[number].settimeout(PATIENCE)
        return self.peers[number].recv(1) == b""


@pytest.fixture
def door():
    door = Door()
    yield door
    # close() alone does not wake the thread.
    door.listener.shutdown(socket.SHUT_RDWR)
    door.listener.close()
    for peer in door.peers:
        peer.close()


@pytest.fixture
def options(tmp_path):
    (tmp_path / "config").touch()
    return SSHOptions(config=tmp_path / "config")


def client(options, keyring=None, timeout=PATIENCE):
    return ParamikoClient(
        options,
        timeout=timeout,
        keyring=lambda: keyring or Keyring(),
        connect_limit=ConnectLimit(options.connect_limit, sleep=lambda _: None),
    )


def at(port: int, name: str = "n1") -> Host:
    return Host(name, address="127.0.0.1", port=port)


def is_ready(connections: ParamikoClient, host: Host) -> bool:
    return host in connections._early._ready


@pytest.fixture
def accepted(monkeypatch):
    """The connections that are made from here, each once."""
    made, of = [], tcp.QuickSocket.__init__

    def counting(self, *words, **more):
        made.append(self)
        of(self, *words, **more)

    monkeypatch.setattr(tcp.QuickSocket, "__init__", counting)
    return made


def test_a_connection_that_was_begun_early_is_the_one_that_is_used(sshd, accepted):
    with closing(Keyring()) as keyring, closing(client(sshd.options(), keyring)) as connections:
        connections.prepare([sshd.host()])
        until(lambda: is_ready(connections, sshd.host()), "the early connection")
        for _ in range(2):
            with closing(connections.connect(sshd.host())) as connection:
                assert read_all(connection.run("echo hello")) == b"hello\n"
    assert len(accepted) == 2


def test_a_connection_at_once_waits_for_the_early_one(sshd, accepted, monkeypatch):
    ask = AskSSH.__call__
    questions = []

    def slow(self, arguments, timeout):
        questions.append(arguments)
        time.sleep(0.2)
        return ask(self, arguments, timeout)

    monkeypatch.setattr(AskSSH, "__call__", slow)
    with closing(Keyring()) as keyring, closing(client(sshd.options(), keyring)) as connections:
        connections.prepare([sshd.host()])
        until(lambda: questions, "the question to ssh")
        connections.connect(sshd.host()).close()
    assert len(questions) == len(accepted) == 1


def test_an_unused_connection_is_closed(options, door):
    connections = client(options)
    connections.prepare([at(door.port)])
    until(lambda: is_ready(connections, at(door.port)), "the early connection")
    connections.close()
    until(lambda: door.has_lost(0), "the end of the connection")


def test_a_connection_that_begins_while_the_job_ends_is_closed(options, door):
    dialing, go_on = threading.Event(), threading.Event()
    made = []

    def slow(settings) -> Dialed | None:
        dialing.set()
        assert go_on.wait(PATIENCE)
        made.append(dial_early(settings))
        return made[0]

    early = EarlyStarts(lambda host: resolve(host, options), lambda: True, slow)
    early.begin([at(door.port), at(door.port + 1)])
    assert dialing.wait(PATIENCE)
    early.close()
    go_on.set()
    until(lambda: door.has_lost(0), "the end of the connection")
    until(lambda: not any(thread.name == "early" for thread in threading.enumerate()), "the thread's end")
    assert len(made) == 1


def test_an_old_connection_is_closed_and_not_used(sshd, accepted, monkeypatch):
    monkeypatch.setattr(tcp, "_FRESH", 0.0)
    with closing(Keyring()) as keyring, closing(client(sshd.options(), keyring)) as connections:
        connections.prepare([sshd.host()])
        until(lambda: is_ready(connections, sshd.host()), "the early connection")
        connections.connect(sshd.host()).close()
    assert len(accepted) == 2
    assert accepted[0].fileno() == -1


def test_one_connection_for_each_address(options, door):
    hosts = [at(door.port, name) for name in ("n1", "n2", "n3")]
    early = EarlyStarts(lambda host: resolve(host, options), lambda: True, dial_early)
    early.begin(hosts)
    until(lambda: not is_at_work(), "the end of the early thread")
    dialed = [begun is not None and begun.dialed is not None for begun in map(early.hand_over, hosts)]
    assert dialed == [True, False, False]


@pytest.mark.parametrize("way", ["command", "jump"])
def test_no_host_behind_another_is_dialed(options, way):
    settings = resolve(at(free_port()), options)
    command, jump = ("gate", None) if way == "command" else (None, "gate")
    assert dial_early(settings._replace(proxy_command=command, proxy_jump=jump)) is None


def outcome(options, host, timeout, *, is_early):
    connections = client(options, timeout=timeout)
    with closing(connections):
        if is_early:
            connections.prepare([host])
            # Without an answer there is nothing to wait for.
            until(lambda: host in connections._early._ready or not is_at_work(), "the early attempt")
        with pytest.raises(HostError) as error:
            connections.connect(host)
    return type(error.value), str(error.value)


def is_at_work() -> bool:
    return any(thread.name == "early" for thread in threading.enumerate())


@pytest.fixture
def silent_port():
    """A port whose kernel drops further connections, since its queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as peers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            peer = peers.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.parametrize("kind", ["refused", "unknown name", "silent", "bad configuration"])
def test_errors_are_as_without_an_early_connection(options, silent_port, kind):
    host, timeout = at(free_port()), PATIENCE
    if kind == "unknown name":
        host = Host("no-such-host.invalid")
    elif kind == "silent":
        host, timeout = at(silent_port), 1.0
    elif kind == "bad configuration":
        options.config.write_text("NoSuchSetting yes\n")
    assert outcome(options, host, timeout, is_early=True) == outcome(options, host, timeout, is_early=False)


def test_hosts_with_settings_of_their_own_are_left_to_their_threads(options, monkeypatch, door):
    options.config.write_text("Host n1\n  User ada\nHost *\n  User bob\n")
    ask, names = AskSSH.__call__, []

    def counting(self, arguments, timeout):
        names.append(arguments[-1])
        return ask(self, arguments, timeout)

    monkeypatch.setattr(AskSSH, "__call__", counting)
    with closing(client(options)) as connections:
        connections.prepare([at(door.port), at(door.port, "n2")])
        until(
            lambda: is_ready(connections, at(door.port)) and not is_at_work(), "the end of the early thread"
        )
        early = connections._early.hand_over(at(door.port))
        assert early is not None
        assert early.settings.user == "ada"
        assert connections._early.hand_over(at(door.port, "n2")) is None
    assert names == ["n1"]
