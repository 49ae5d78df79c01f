"""Streams to hosts: TCP (which address, which error, how long), a ProxyCommand's stdio, borrowed sockets."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import psutil
import pytest

from hvlaunch.errors import ConnectFailed, HostError, StartTimeout, UnknownHost
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh import streams
from hvlaunch.ssh.by_paramiko import ParamikoClient
from hvlaunch.ssh.config import AskSSH, resolve
from hvlaunch.ssh.keyring import Keyring
from hvlaunch.ssh.streams import (
    ConnectLimit,
    Dialed,
    EarlyStarts,
    QuickSocket,
    borrow,
    dial,
    dial_early,
    persist,
    silence,
    start_proxy,
)
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, free_port, gone, read_all


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "config").touch()

    def make(**words):
        found = resolve(Host("localhost"), SSHOptions(config=tmp_path / "config"))
        return found._replace(**words)

    return make


def soon() -> float:
    return time.monotonic() + PATIENCE


@pytest.fixture
def full_port():
    """A port whose kernel drops further connections: its queue is full, and nobody accepts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
        for sock in waiting:
            sock.close()


def test_no_delays(serve, settings):
    port = serve(lambda peer: peer.sendall(b"x" * 1000))
    with dial("node", settings(hostname="127.0.0.1", port=port), soon()) as sock:
        assert isinstance(sock, QuickSocket)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        received = b""
        while len(received) < 1000:
            received += sock.recv(100)
        assert len(sock.greeting) >= 256
        assert received.startswith(sock.greeting)


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="needs Linux")
def test_every_answer_is_acknowledged_at_once(serve, settings):
    def echo(peer: socket.socket) -> None:
        while data := peer.recv(100):
            peer.sendall(data)

    port = serve(echo)
    with dial("node", settings(hostname="127.0.0.1", port=port), soon()) as sock:
        for _ in range(20):  # the kernel takes us for interactive, and delays
            sock.sendall(b"ping")
            assert sock.recv(100) == b"ping"
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1


def test_an_unknown_name(settings):
    with pytest.raises(
        UnknownHost, match=r"the name no-such-host\.invalid can't be resolved to an address: "
    ) as caught:
        dial("node", settings(hostname="no-such-host.invalid"), soon())
    assert caught.value.host == "node"


@pytest.mark.parametrize("name", ["x" * 64, "a..b"])
def test_an_impossible_name(settings, name):
    with pytest.raises(UnknownHost):
        dial("node", settings(hostname=name), soon())


def test_refused(settings):
    port = free_port()
    cause = f"no connection to 127.0.0.1 port {port}: 127.0.0.1: Connection refused"
    with pytest.raises(ConnectFailed, match=cause) as caught:
        dial("node", settings(hostname="127.0.0.1", port=port), soon())
    assert "-p PORT" in (caught.value.hint or "")


def test_every_address_is_tried(settings, serve):
    """localhost is often ::1 and 127.0.0.1; the server has only the latter."""
    port = serve(lambda peer: None)
    with dial("node", settings(hostname="localhost", port=port), soon()) as sock:
        assert sock.getpeername()[0] == "127.0.0.1"


def test_the_address_family_is_kept(settings, serve):
    port = serve(lambda peer: None)
    with pytest.raises((ConnectFailed, UnknownHost)):
        dial("node", settings(hostname="127.0.0.1", port=port, address_family=socket.AF_INET6), soon())


def test_no_answer_until_the_deadline(settings, full_port):
    found = settings(hostname="127.0.0.1", port=full_port)
    started = time.monotonic()
    with pytest.raises(StartTimeout, match=r"127\.0\.0\.1: no answer"):
        dial("node", found, started + 1.0)
    assert time.monotonic() - started >= 1.0


def test_no_answer_within_the_configured_time(settings, full_port):
    with pytest.raises(ConnectFailed, match="no answer") as caught:
        dial("node", settings(hostname="127.0.0.1", port=full_port, connect_timeout=0.2), soon())
    assert "firewall" in (caught.value.hint or "")


def test_no_time_left(settings):
    with pytest.raises(StartTimeout, match="no time was left of --start-timeout"):
        dial("node", settings(hostname="127.0.0.1"), time.monotonic())


def test_unacknowledged_data_is_resent_each_second() -> None:
    with socket.socket() as sock:
        if not persist(sock):
            pytest.skip("TCP_RTO_MAX_MS: Linux 6.15")
        found = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in (44, socket.TCP_USER_TIMEOUT)]
    assert found == [1000, 900_000]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="a kernel that does not tell")
def test_silence_counts_from_the_last_acknowledgement(settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with dial("a", settings(hostname="127.0.0.1", port=port), soon()) as sock, server.accept()[0]:
            while (before := silence(sock) or 0.0) < 0.05:
                time.sleep(0.01)
            sock.sendall(b"x")
            while (silence(sock) or 0.0) >= before:
                time.sleep(0.001)
        assert silence(sock) is None  # closed


def test_small_packets_take_small_reads_and_a_stream_large_ones() -> None:
    """Python takes memory for all that a read may bring: for a login 256 KB each time would be half of the time."""
    ours, theirs = socket.socketpair()
    with QuickSocket(fileno=ours.detach()) as quick, theirs:
        theirs.sendall(b"SSH-2.0-small\r\n")
        assert quick.recv(4) == b"SSH-"
        assert quick._size == 1 << 14
        theirs.sendall(bytes(1 << 15))
        received = len(quick.recv(1 << 18))
        while received < (1 << 15) + len("2.0-small\r\n"):
            received += len(quick.recv(1 << 18))
        assert quick._size == 1 << 18


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
    made, of = [], streams.QuickSocket.__init__

    def counting(self, *words, **more):
        made.append(self)
        of(self, *words, **more)

    monkeypatch.setattr(streams.QuickSocket, "__init__", counting)
    return made


def test_a_connection_that_was_begun_early_is_the_one_that_is_used(sshd, accepted):
    with closing(Keyring()) as keyring, closing(client(sshd.options(), keyring)) as connections:
        connections.prepare([sshd.host()])
        wait_until(lambda: is_ready(connections, sshd.host()), "the early connection")
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
        wait_until(lambda: questions, "the question to ssh")
        connections.connect(sshd.host()).close()
    assert len(questions) == len(accepted) == 1


def test_an_unused_connection_is_closed(options, door):
    connections = client(options)
    connections.prepare([at(door.port)])
    wait_until(lambda: is_ready(connections, at(door.port)), "the early connection")
    connections.close()
    wait_until(lambda: door.has_lost(0), "the end of the connection")


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
    wait_until(lambda: door.has_lost(0), "the end of the connection")
    wait_until(
        lambda: not any(thread.name == "early" for thread in threading.enumerate()), "the thread's end"
    )
    assert len(made) == 1


def test_an_old_connection_is_closed_and_not_used(sshd, accepted, monkeypatch):
    monkeypatch.setattr(streams, "_FRESH", 0.0)
    with closing(Keyring()) as keyring, closing(client(sshd.options(), keyring)) as connections:
        connections.prepare([sshd.host()])
        wait_until(lambda: is_ready(connections, sshd.host()), "the early connection")
        connections.connect(sshd.host()).close()
    assert len(accepted) == 2
    assert accepted[0].fileno() == -1


def test_one_connection_for_each_address(options, door):
    hosts = [at(door.port, name) for name in ("n1", "n2", "n3")]
    early = EarlyStarts(lambda host: resolve(host, options), lambda: True, dial_early)
    early.begin(hosts)
    wait_until(lambda: not is_at_work(), "the end of the early thread")
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
            wait_until(lambda: host in connections._early._ready or not is_at_work(), "the early attempt")
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
        wait_until(
            lambda: is_ready(connections, at(door.port)) and not is_at_work(), "the end of the early thread"
        )
        early = connections._early.hand_over(at(door.port))
        assert early is not None
        assert early.settings.user == "ada"
        assert connections._early.hand_over(at(door.port, "n2")) is None
    assert names == ["n1"]


def test_bytes_in_both_directions():
    stream = start_proxy("a", "cat")
    stream.sendall(b"SSH-2.0-x\r\n")
    assert stream.recv(100) == stream.greeting == b"SSH-2.0-x\r\n"
    assert (stream.local_address, stream.remote_address) == ("", "")
    stream.close()


def test_a_command_that_fails_says_why():
    command = "sh -c 'echo one >&2; echo no way out >&2; exit 3'"
    stream = start_proxy("a", command)
    assert stream.recv(1) == b""
    assert stream.problem() == f"its ProxyCommand `{command}` ended with status 3: no way out"
    stream.close()


def test_a_command_that_did_its_work_is_no_problem():
    stream = start_proxy("a", "true")
    assert stream.recv(1) == b""
    assert stream.problem() is None
    stream.close()


@pytest.mark.parametrize(
    "command", ["sleep 600", "sh -c 'sleep 600 & wait'", "sh -c 'trap \"\" TERM; sleep 600; :'"]
)
def test_closing_ends_the_command_with_its_children(command):
    stream = start_proxy("a", command)
    leader = psutil.Process(stream._process.pid)
    wait_until(
        lambda: [p for p in (leader, *leader.children(recursive=True)) if p.name() == "sleep"], "the command"
    )
    processes = [leader, *leader.children(recursive=True)]
    stream.close()
    stream.close()
    wait_until(lambda: all(gone(process) for process in processes), "the command to end")
    assert not psutil.pid_exists(leader.pid)


def test_a_reader_is_unblocked_by_shutdown():
    stream = start_proxy("a", "sleep 600")
    stream.shutdown(socket.SHUT_RDWR)
    assert stream.recv(1) == b""
    stream.close()


def test_a_command_that_can_not_be_one():
    with pytest.raises(ConnectFailed, match="can't be started") as caught:
        start_proxy("a", "nul\0")
    assert caught.value.host == "a"


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
