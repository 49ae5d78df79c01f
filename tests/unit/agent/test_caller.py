"""The caller by itself: which address wins, what it proves and believes, on every Python; mpi's door is tested with it."""

import os
import socket
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.agent import caller
from tests.unit.agent.harness import interpreter

ROOT = str(Path(hvlaunch.__file__).parents[1])
SECRET = b"the token"
PROGRAM = b"import os; os.write(1, b'got ' + os.read(0, 5)); os._exit(5)"


class Driver:
    """Answers one call after the other, in the way that the test says."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.where = f"127.0.0.1 {self.listener.getsockname()[1]}"

    def accept(self, who=caller.DRIVER, token=SECRET):
        """The connection, the caller's challenge and ours, which is answered by `who` with the token."""
        call, _ = self.listener.accept()
        call.settimeout(60)
        theirs = caller.receive(call, caller.CHALLENGE)
        ours = os.urandom(caller.CHALLENGE)
        call.sendall(ours + caller.proof(token, who, theirs, ours))
        return call, theirs, ours

    def close(self):
        self.listener.close()


@pytest.fixture
def driver():
    with closing(Driver()) as driver:
        yield driver


def start(*addresses, python=sys.executable):
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); from hvlaunch.agent import caller; caller.main(['RANK'])"
    )
    env = {caller.TOKEN: SECRET.decode(), caller.ADDRESSES: ",".join(addresses), "RANK": "3", "SECRET": "x"}
    return subprocess.Popen(
        [python, "-I", "-S", "-X", "utf8", "-c", code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"])
def test_the_drivers_program_runs_on_every_python_with_the_connection_for_its_pipes(driver, version):
    process = start(driver.where, python=interpreter(version))
    call, theirs, ours = driver.accept()
    assert caller.receive(call, caller.CHALLENGE) == caller.proof(SECRET, caller.AGENT, ours, theirs)
    size = int.from_bytes(caller.receive(call, 4), "big")
    assert caller.receive(call, size) == f'["{socket.gethostname()}", {{"RANK": "3"}}]'.encode()
    program = zlib.compress(PROGRAM)
    call.sendall(len(program).to_bytes(4, "big") + program + b"frame")
    assert caller.receive(call, 9) == b"got frame"
    assert process.wait(60) == 5
    assert process.communicate() == (b"", b"")
    call.close()


@pytest.mark.parametrize(("who", "token"), [(caller.AGENT, SECRET), (caller.DRIVER, b"another")])
def test_who_does_not_prove_to_be_the_driver_gets_no_proof_and_runs_nothing(driver, who, token):
    process = start(driver.where)
    call, _, _ = driver.accept(who, token)
    with closing(call), pytest.raises(OSError, match=r"hung up|reset"):
        caller.receive(call, 1)
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
        first, _, _ = driver.accept()
        caller.receive(first, caller.CHALLENGE)
        late, _, _ = silent.accept()
        first.close()
        assert process.wait(60) == 1
        assert process.communicate() == (b"", b"")
        with closing(late), pytest.raises(OSError, match=r"hung up|reset"):
            caller.receive(late, 1)
