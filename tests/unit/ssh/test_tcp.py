"""TCP connections: which address, which error, how long."""

import socket
import time

import pytest

from hvlaunch.errors import ConnectFailed, StartTimeout, UnknownHost
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import resolve
from hvlaunch.ssh.tcp import QuickSocket, dial, persist, silence

from .conftest import PATIENCE, free_port


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
