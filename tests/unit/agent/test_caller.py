"""The caller by itself: which address wins, whom it believes, on every Python; mpi's listener is tested with it."""

import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.agent.wire import caller
from hvlaunch.agent.wire.caller import Sealed
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from hvlaunch.ssh.streams import persist
from tests.unit.agent.harness import interpreter

ROOT = str(Path(hvlaunch.__file__).parents[1])
ENTRY = b"the word that lets callers in"
CERTIFICATE = Certificate()
PROGRAM = b"""
import os
data = b""
while len(data) < 5:
    data += sealed.open(os.read(0, 100))
os.write(1, sealed.seal(b"got " + data))
os._exit(5)
"""

OPTIONS = b"""
import os, socket
own = socket.socket(fileno=0)
os.write(1, sealed.seal(b"%4d %6d" % tuple(own.getsockopt(socket.IPPROTO_TCP, option) for option in (44, 18))))
os._exit(0)
"""
"""Tells TCP_RTO_MAX_MS and TCP_USER_TIMEOUT of its connection."""


class Driver:
    """Takes one call after the other."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.where = f"127.0.0.1 {self.listener.getsockname()[1]}"

    def accept(self, certificate: Certificate = CERTIFICATE) -> Sealed:
        """The next call, once each side has shaken hands."""
        sock, _ = self.listener.accept()
        sock.settimeout(60)
        call = Sealed(sock, tls_context(certificate), server_side=True)
        call.shake_hands()
        return call

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def driver() -> Iterator[Driver]:
    with closing(Driver()) as driver:
        yield driver


def start(*addresses: str, python: str = sys.executable) -> "subprocess.Popen[bytes]":
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from hvlaunch.agent.wire import caller; caller.main(['RANK'])"
    env = {
        caller.ENTRY: ENTRY.decode(),
        caller.CERTIFICATE: CERTIFICATE.fingerprint,
        caller.ADDRESSES: ",".join(addresses),
        "RANK": "3",
        "SECRET": "x",
    }
    return subprocess.Popen(
        [python, "-I", "-S", "-X", "utf8", "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def part(call: Sealed) -> bytes:
    """What the caller says next, which its size goes before."""
    return call.receive(int.from_bytes(call.receive(4), "big"))


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_the_drivers_program_runs_on_every_python_with_the_connection_for_its_pipes(
    driver: Driver, version: str
) -> None:
    process = start(driver.where, python=interpreter(version))
    call = driver.accept()
    assert part(call) == ENTRY
    assert part(call) == f'["{socket.gethostname()}",{{"RANK":"3"}}]'.encode()
    program = zlib.compress(PROGRAM)
    call.sendall(b"w" * caller.WORD_SIZE + len(program).to_bytes(4, "big") + program)
    call.sendall(b"frame")
    assert call.receive(9) == b"got frame"
    assert process.wait(60) == 5
    assert process.communicate() == (b"", b"")
    call.socket.close()


def test_lost_data_is_sent_again_each_second(driver: Driver) -> None:
    process = start(driver.where)
    call = driver.accept()
    with closing(call.socket):
        if not persist(call.socket):
            pytest.skip("TCP_RTO_MAX_MS: Linux 6.15")
        program = zlib.compress(OPTIONS)
        call.sendall(b"w" * caller.WORD_SIZE + len(program).to_bytes(4, "big") + program)
        assert part(call) == ENTRY
        part(call)  # what it says of itself
        assert call.receive(11) == b"1000 900000"
        assert process.wait(60) == 0
    process.communicate()


def test_driver_with_another_certificate_gets_nothing_and_runs_nothing(driver: Driver) -> None:
    process = start(driver.where)
    call = driver.accept(Certificate())
    with closing(call.socket), pytest.raises(OSError, match=r"closed the connection|reset"):
        call.receive(1)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        stderr.decode()
        .strip()
        .endswith(f"port {driver.where.split()[1]}: the program there is not the driver")
    )


def test_server_without_tls_gets_nothing(driver: Driver) -> None:
    process = start(driver.where)
    sock, _ = driver.listener.accept()
    with closing(sock):
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        _, stderr = process.communicate(timeout=60)
        assert ENTRY not in sock.recv(1 << 16)
    assert process.returncode == 1
    assert b"the other side does not speak TLS" in stderr


def test_every_address_is_tried_and_each_failure_reported(driver: Driver) -> None:
    driver.close()
    process = start(driver.where, "127.0.0.1 1", "no-such-host.invalid 2")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    text = stderr.decode()
    assert text.startswith(f"hvlaunch: {socket.gethostname()} can't reach the driver: ")
    assert all(f"{where.replace(' ', ' port ')}: " in text for where in (driver.where, "127.0.0.1 1"))
    assert "no-such-host.invalid port 2: " in text


def test_first_answering_address_wins_and_others_get_no_word(driver: Driver) -> None:
    with closing(Driver()) as silent:
        process = start(silent.where, driver.where)
        first = driver.accept()
        assert part(first) == ENTRY
        late = silent.accept()
        first.socket.close()
        assert process.wait(60) == 1
        assert process.communicate() == (b"", b"")
        with closing(late.socket), pytest.raises(OSError, match=r"closed the connection|reset"):
            late.receive(1)
