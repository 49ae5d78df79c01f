"""The first words between an agent's boot and the driver: the real boot, and strangers."""

import binascii
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import zlib
from contextlib import closing, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY, WORD_SIZE
from hvlaunch.mpi import Kind, names_of
from hvlaunch.mpi.calls import CallListener, ReturnCalls
from hvlaunch.mpi.request import caller_command
from hvlaunch.rendezvous.serving.certificate import Certificate
from tests.unit.agent.harness import interpreter

KEY = Certificate()
NAMES = names_of(Kind.OPEN_MPI)
PROGRAM = b"""
import os
os.write(1, sealed.seal(b"runs with " + sealed.open(os.read(0, 1000)) + b", runs"))
os._exit(5)
"""


def boot(entry, addresses, python=sys.executable, certificate=KEY, limit=60, **more):
    env = {
        **os.environ,
        ENTRY: entry,
        CERTIFICATE: certificate.fingerprint,
        ADDRESSES: addresses,
        "OMPI_COMM_WORLD_RANK": "3",
        "HOME": "/x",
    }
    words = caller_command(NAMES, python, limit=limit)
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@pytest.fixture
def callers():
    return SimpleQueue()


@pytest.fixture
def listener(callers):
    with closing(CallListener("the word", KEY, callers.put, host="127.0.0.1")) as listener:
        yield listener


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.15"])
def test_an_agent_comes_in_and_runs_what_it_gets(listener, callers, version):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an address that leads to something else
        where = f"127.0.0.1 {silent.getsockname()[1]},127.0.0.1 1,127.0.0.1 {listener.port}"
        process = boot("the word", where, interpreter(version))
        caller = callers.get(timeout=60)
        assert caller.hostname == socket.gethostname()
        assert caller.environ == {"OMPI_COMM_WORLD_RANK": "3"}
        program = zlib.compress(PROGRAM)
        caller.connection.sendall(b"w" * WORD_SIZE + len(program).to_bytes(4, "big") + program)
        caller.connection.sendall(b"frame")
        answer = b""
        while part := caller.connection.socket.recv(100):
            answer += caller.connection.open(part)
        assert (answer, process.wait(60)) == (b"runs with frame, runs", 5)
        process.communicate()
        caller.connection.socket.close()


CALLS_AGAIN = b"""
again = sealed.again()
again.sendall(b"again")
os = __import__("os")
os._exit(7)
"""


def test_an_agent_calls_again_by_a_word_of_its_own(callers):
    returns, called = ReturnCalls(), threading.Event()
    with closing(CallListener("the word", KEY, callers.put, host="127.0.0.1", returns=returns)) as listener:
        process = boot("the word", f"127.0.0.1 {listener.port}")
        caller = callers.get(timeout=60)
        word, program = returns.expect(called.set), zlib.compress(CALLS_AGAIN)
        caller.connection.sendall(word + len(program).to_bytes(4, "big") + program)
        assert called.wait(60)
        call = returns.next(word, 60)
        assert call is not None
        assert call.receive(5) == b"again"
        assert process.wait(60) == 7
        process.communicate()
        for sealed in (call, caller.connection):
            sealed.socket.close()
        assert callers.empty()
        assert returns.next(word, 0) is None
        assert returns.next(b"another's", 0) is None


def test_newest_call_of_an_agent_counts():
    returns = ReturnCalls()
    word = returns.expect(lambda: None)
    pairs = [socket.socketpair() for _ in range(4)]
    calls: list[Any] = [SimpleNamespace(socket=ours) for ours, _ in pairs]
    for each in calls:
        returns.add(word, each)
    assert returns.next(word, 0) is calls[-1]
    returns.close()
    returns.add(word, calls.pop())
    for _, theirs in pairs:
        assert theirs.recv(1) == b""  # hung up on
        theirs.close()


def test_a_caller_with_another_word_is_not_let_in(listener, callers):
    process = boot("another word", f"127.0.0.1 {listener.port}")
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 1
    assert callers.empty()


def test_driver_with_another_certificate_gets_nothing(listener, callers):
    process = boot("the word", f"127.0.0.1 {listener.port}", certificate=Certificate())
    _, said = process.communicate(timeout=60)
    assert b"can't reach the driver: 127.0.0.1 port" in said
    assert b"the program there is not the driver" in said
    assert process.returncode == 1
    assert callers.empty()


@pytest.mark.parametrize(
    "said", [b"x" * 32, b"\x16\x03\x01" + b"x" * 100, b"\x16\x03\x01\xff\xff" + b"\0" * 70_000]
)
def test_a_stranger_is_not_let_in_and_learns_nothing(listener, callers, said):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as stranger, suppress(OSError):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        answer = b""
        while part := stranger.recv(100):
            answer += part
        assert len(answer) < 10  # an alert
    assert callers.empty()


def test_an_agent_that_is_sent_away_ends_quietly(listener, callers):
    process = boot("the word", f"127.0.0.1 {listener.port}")
    callers.get(timeout=60).connection.socket.close()
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 1


def test_a_caller_that_gets_no_program_ends_by_itself(listener, callers):
    process = boot("the word", f"127.0.0.1 {listener.port}", limit=2)
    with closing(callers.get(timeout=60).connection.socket):
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == -signal.SIGALRM


def test_host_without_a_python_is_reported():
    words = caller_command(NAMES, "/nonexistent/python")
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (
        127,
        f"hvlaunch: host {os.uname().nodename}: no Python >= 3.8 among /nonexistent/python\n",
    )


def test_output_of_a_shim_before_the_version_is_ignored(tmp_path):
    shim = tmp_path / "python"
    shim.write_text(
        '#!/bin/sh\necho "pyenv: rehashing"\n[ "$1" = -V ] && echo "Python 3.11.7" || echo started\n'
    )
    shim.chmod(0o755)
    answer = subprocess.run(caller_command(NAMES, str(shim)), capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (0, "pyenv: rehashing\nstarted\n")


def test_launcher_command_line_is_short_and_has_no_secret():
    words = caller_command(NAMES)
    assert sum(map(len, words)) < 6000
    assert words[-2:] == ("python3", "python")


def test_program_has_only_characters_that_shells_and_launchers_keep():
    program = caller_command(NAMES)[3]
    assert re.fullmatch(r"[A-Za-z0-9+/]+=*", program)
    text = zlib.decompress(binascii.a2b_base64(program)).decode()
    assert "OMPI_COMM_WORLD_RANK" in text
    assert '"""' not in text
