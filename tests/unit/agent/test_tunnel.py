"""The tunnel of a preset's services: bytes pass unchanged, and nobody without the job's secret or of another user gets in."""

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvlaunch.agent.facts import free_port
from hvlaunch.agent.services.tunnel import Entrance, Exit, is_own
from hvlaunch.rendezvous.serving.certificate import new_peer

DATA = os.urandom(1 << 23)


def echo(listener: socket.socket) -> None:
    """Send what comes back, on each connection."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def keys() -> dict[str, str]:
    return dict(new_peer())


@pytest.fixture
def address(keys: dict[str, str], service: int, tmp_path: Path) -> str:
    kept = free_port()
    port = kept.getsockname()[1]
    kept.close()
    Exit(keys, port, service, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    return f"127.0.0.1:{port}"


def received(connection: socket.socket, size: int) -> bytes:
    """Return what comes until the connection ends, or is reset since it had bytes that nobody read."""
    data = b""
    with suppress(ConnectionResetError):
        while len(data) < size and (more := connection.recv(1 << 20)):
            data += more
    return data


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


def test_bytes_pass_both_ways_at_the_same_time(keys: dict[str, str], address: str) -> None:
    entrance = Entrance(keys, address)
    assert entrance.is_open()
    with connect(entrance.port) as first, connect(entrance.port) as second:
        # Sent by a thread: neither side waits for the other to read everything.
        threading.Thread(target=first.sendall, args=(DATA,), daemon=True).start()
        second.sendall(b"x")
        assert received(second, 1) == b"x"
        assert received(first, len(DATA)) == DATA


def test_the_end_of_the_service_is_the_end_of_the_connection(keys: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = free_port()
        port = kept.getsockname()[1]
        kept.close()
        Exit(keys, port, listener.getsockname()[1], str(tmp_path))
        entrance = Entrance(keys, f"127.0.0.1:{port}")
        with connect(entrance.port) as connection:
            connection.sendall(b"hello")
            served, _ = listener.accept()
            assert served.recv(100) == b"hello"
            served.close()
            assert received(connection, 1) == b""
    assert not entrance.is_open()
    with connect(entrance.port) as connection:
        assert received(connection, 1) == b""


@pytest.mark.parametrize("name", ["secret", "fingerprint"])
def test_another_jobs_keys_are_refused(keys: dict[str, str], address: str, name: str) -> None:
    entrance = Entrance({**keys, name: new_peer()[name]}, address)
    assert not entrance.is_open()
    with connect(entrance.port) as connection:
        assert received(connection, 1) == b""


def test_strangers_do_not_reach_the_service_and_hold_up_nobody(keys: dict[str, str], address: str) -> None:
    port = int(address.rpartition(":")[2])
    silent = [connect(port) for _ in range(50)]
    with connect(port) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b"+" not in received(plain, 100)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(port) as plain, context.wrap_socket(plain) as peer:
        peer.sendall(b"0" * len(keys["secret"]))
        assert received(peer, 1) == b""
    assert Entrance(keys, address).is_open()
    for connection in silent:
        # Each is closed by the server.
        assert received(connection, 1) == b""
        connection.close()


def test_a_connection_of_this_user_is_own() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connect(listener.getsockname()[1]),
        listener.accept()[0] as connection,
    ):
        assert is_own(connection)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_is_refused(keys: dict[str, str], address: str) -> None:
    def answer(user: int) -> bytes:
        """What the service answers to a child of that user."""
        reader, writer = os.pipe()
        port = Entrance(keys, address).port
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                os.setuid(user)
                with connect(port) as connection:
                    connection.sendall(b"x")
                    os.write(writer, received(connection, 1) or b"closed")
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            return file.read()

    assert answer(0) == b"x"
    assert answer(65534) == b"closed"
