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
from hvlaunch.mpi.caller_command import caller_command
from hvlaunch.mpi.door import Door
from tests.unit.agent.harness import interpreter

NAMES = frozenset({"OMPI_COMM_WORLD_RANK"})
PROGRAM = b"import os; os.write(1, b'runs with ' + os.read(0, 5)); os._exit(5)"


def boot(token, addresses, python=sys.executable, **more):
    env = {**os.environ, TOKEN: token, ADDRESSES: addresses, "OMPI_COMM_WORLD_RANK": "3", "HOME": "/x"}
    words = caller_command(NAMES, python)
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.fixture
def members():
    return SimpleQueue()


@pytest.fixture
def door(members):
    with closing(Door("the token", members.put)) as door:
        yield door


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.15"])
def test_an_agent_comes_in_and_runs_what_it_gets(door, members, version):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an address that leads to something else
        where = f"127.0.0.1 {silent.getsockname()[1]},127.0.0.1 1,127.0.0.1 {door.port}"
        process = boot("the token", where, interpreter(version))
        member = members.get(timeout=60)
        assert member.hostname == socket.gethostname()
        assert member.environ == {"OMPI_COMM_WORLD_RANK": "3"}
        program = zlib.compress(PROGRAM)
        member.socket.sendall(len(program).to_bytes(4, "big") + program + b"frame")
        answer = b""
        while part := member.socket.recv(100):
            answer += part
        assert (answer, process.wait(60)) == (b"runs with frame", 5)
        process.communicate()
        member.socket.close()


def test_neither_side_believes_another_token(door, members):
    process = boot("another token", f"127.0.0.1 {door.port}")
    _, said = process.communicate(timeout=60)
    assert b"can't reach the driver: 127.0.0.1 port" in said
    assert b"that is not the driver" in said
    assert process.returncode == 1
    assert members.empty()


def test_a_stranger_is_not_let_in_and_learns_no_token(door, members):
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(b"x" * 32)
        answer = b""
        while len(answer) < 64:
            answer += stranger.recv(64)
        assert b"the token" not in answer
        stranger.sendall(answer[32:] + (2).to_bytes(4, "big") + b"[]")  # the door's own proof, sent back
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert members.empty()


def test_an_agent_that_is_sent_away_ends_quietly(door, members):
    process = boot("the token", f"127.0.0.1 {door.port}")
    members.get(timeout=60).socket.close()
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
