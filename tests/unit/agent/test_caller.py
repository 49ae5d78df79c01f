"""The caller by itself: which address wins, what it proves and believes, on every Python; mpi's door is tested with it."""

import socket
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.agent import caller
from hvlaunch.agent.caller import Sealed
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from tests.unit.agent.harness import interpreter

ROOT = str(Path(hvlaunch.__file__).parents[1])
WORD = "the word"
KEY, ANOTHER = Certificate(), Certificate()
PROGRAM = b"import os; os.write(1, sealed.seal(b'got ' + sealed.open(os.read(0, 1000)))); os._exit(5)"


class Driver:
    """Answers one call after the other, in the way that the test says."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.where = f"127.0.0.1 {self.listener.getsockname()[1]}"

    def accept(self, certificate=KEY):
        """The connection, once hands are shaken."""
        call, _ = self.listener.accept()
        call.settimeout(60)
        sealed = Sealed(call, tls_context(certificate), server_side=True)
        sealed.shake_hands()
        return sealed

    def close(self):
        self.listener.close()


@pytest.fixture
def driver():
    with closing(Driver()) as driver:
        yield driver


def part(call):
    return call.receive(int.from_bytes(call.receive(4), "big"))


def start(*addresses, python=sys.executable):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); from hvlaunch.agent import caller; caller.main(['RANK'])"
    )
    env = {
        caller.ENTRY: WORD,
        caller.CERTIFICATE: KEY.fingerprint,
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


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_the_drivers_program_runs_on_every_python_with_the_connection_for_its_pipes(driver, version):
    process = start(driver.where, python=interpreter(version))
    call = driver.accept()
    assert part(call) == WORD.encode()
    assert part(call) == f'["{socket.gethostname()}", {{"RANK": "3"}}]'.encode()
    program = zlib.compress(PROGRAM)
    call.sendall(len(program).to_bytes(4, "big") + program)
    call.sendall(b"frame")
    assert call.receive(9) == b"got frame"
    assert process.wait(60) == 5
    assert process.communicate() == (b"", b"")
    call.socket.close()


def test_who_does_not_prove_to_be_the_driver_is_told_nothing_and_runs_nothing(driver):
    process = start(driver.where)
    call = driver.accept(ANOTHER)
    with closing(call.socket), pytest.raises(OSError, match=r"hung up|reset"):
        call.receive(1)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.decode().strip().endswith(f"port {driver.where.split()[1]}: that is not the driver")


def test_every_address_is_tried_and_all_failures_are_told(driver):
    driver.close()
    process = start(driver.where, "127.0.0.1 1", "no-such-host.invalid 2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    text = said.decode()
    assert text.startswith(f"hvlaunch: {socket.gethostname()} can't reach the driver: ")
    assert all(f"{where.replace(' ', ' port ')}: " in text for where in (driver.where, "127.0.0.1 1"))
    assert "no-such-host.invalid port 2: " in text


def test_the_first_that_answers_wins_and_the_next_is_not_told_who_calls(driver):
    with closing(Driver()) as silent:
        process = start(silent.where, driver.where)
        first = driver.accept()
        assert part(first) == WORD.encode()
        late = silent.accept()
        first.socket.close()
        assert process.wait(60) == 1
        assert process.communicate() == (b"", b"")
        with closing(late.socket), pytest.raises(OSError, match=r"hung up|reset"):
            late.receive(1)
