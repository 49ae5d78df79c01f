"""The first words between an agent's boot and the driver: the real boot, and strangers."""

import binascii
import os
import re
import socket
import subprocess
import sys
import zlib
from contextlib import closing, suppress
from queue import SimpleQueue

import pytest

from hvlaunch.agent.caller import ADDRESSES, TOKEN
from hvlaunch.mpi.call_listener import CallListener
from hvlaunch.mpi.caller_command import caller_command
from tests.unit.agent.harness import interpreter

NAMES = frozenset({"OMPI_COMM_WORLD_RANK"})
PROGRAM = b"import os; os.write(1, b'runs with ' + os.read(0, 5)); os._exit(5)"


def boot(token, addresses, python=sys.executable, **more):
    env = {**os.environ, TOKEN: token, ADDRESSES: addresses, "OMPI_COMM_WORLD_RANK": "3", "HOME": "/x"}
    words = caller_command(NAMES, python)
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.fixture
def callers():
    return SimpleQueue()


@pytest.fixture
def listener(callers):
    with closing(CallListener("the token", callers.put)) as listener:
        yield listener


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.15"])
def test_an_agent_comes_in_and_runs_what_it_gets(listener, callers, version):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an address that leads to something else
        where = f"127.0.0.1 {silent.getsockname()[1]},127.0.0.1 1,127.0.0.1 {listener.port}"
        process = boot("the token", where, interpreter(version))
        caller = callers.get(timeout=60)
        assert caller.hostname == socket.gethostname()
        assert caller.environ == {"OMPI_COMM_WORLD_RANK": "3"}
        program = zlib.compress(PROGRAM)
        caller.socket.sendall(len(program).to_bytes(4, "big") + program + b"frame")
        answer = b""
        while part := caller.socket.recv(100):
            answer += part
        assert (answer, process.wait(60)) == (b"runs with frame", 5)
        process.communicate()
        caller.socket.close()


def test_neither_side_believes_another_token(listener, callers):
    process = boot("another token", f"127.0.0.1 {listener.port}")
    _, said = process.communicate(timeout=60)
    assert b"can't reach the driver: 127.0.0.1 port" in said
    assert b"that is not the driver" in said
    assert process.returncode == 1
    assert callers.empty()


def test_a_stranger_is_not_let_in_and_learns_no_token(listener, callers):
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"x" * 32)
        answer = b""
        while len(answer) < 64:
            answer += stranger.recv(64)
        assert b"the token" not in answer
        stranger.sendall(answer[32:] + (2).to_bytes(4, "big") + b"[]")  # the listener's own proof, sent back
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert callers.empty()


def test_an_agent_that_is_sent_away_ends_quietly(listener, callers):
    process = boot("the token", f"127.0.0.1 {listener.port}")
    callers.get(timeout=60).socket.close()
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 1


def test_a_host_without_a_python_is_told_of():
    words = caller_command(NAMES, "/nonexistent/python")
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (
        127,
        f"hvlaunch: host {os.uname().nodename}: no Python >= 3.8 among /nonexistent/python\n",
    )


def test_what_a_shim_prints_before_its_version_is_no_matter(tmp_path):
    shim = tmp_path / "python"
    shim.write_text(
        '#!/bin/sh\necho "pyenv: rehashing"\n[ "$1" = -V ] && echo "Python 3.11.7" || echo started\n'
    )
    shim.chmod(0o755)
    answer = subprocess.run(caller_command(NAMES, str(shim)), capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "pyenv: rehashing\nstarted\n")


def test_nothing_secret_and_not_much_is_on_the_command_line():
    words = caller_command(NAMES)
    assert sum(map(len, words)) < 2500
    assert words[-2:] == ("python3", "python")


def test_the_program_has_nothing_that_a_shell_or_a_launcher_could_change():
    program = caller_command(NAMES)[3]
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", program)
    text = zlib.decompress(binascii.a2b_base64(program)).decode()
    assert "OMPI_COMM_WORLD_RANK" in text
    assert '"""' not in text
