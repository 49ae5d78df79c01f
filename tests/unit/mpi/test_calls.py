"""Calls of agents: the first words between the real boot and the driver, strangers, and who has come."""

import binascii
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import zlib
from contextlib import closing, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY, WORD_SIZE, Sealed
from hvlaunch.errors import AgentFailed, StartTimeout
from hvlaunch.mpi import Kind, names_of
from hvlaunch.mpi.calls import AgentCaller, Arrivals, CallListener, LauncherFailed, ReturnCalls
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


def caller(hostname, rank, local=0, size=None):
    here, there = socket.socketpair()
    there.close()
    sealed = Sealed(here, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), server_side=True)
    numbers = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_SIZE": size}
    environ = {
        f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items() if number is not None
    }
    return AgentCaller(sealed, hostname, environ)


def arrivals_of(*hosts):
    return Arrivals(hosts, Kind.OPEN_MPI)


def found(arrivals, *hosts):
    return {
        host: (agent.hostname, count) for host in hosts for agent, count in [arrivals.agent_of(host, 0.01)]
    }


def test_each_hosts_agent_is_that_of_its_first_rank():
    arrivals = arrivals_of(("a", 2), ("b", 1), ("c", 1))
    for came in (caller("b", 2), caller("c.example.com", 3, size=1), caller("a", 0, size=2)):
        assert not arrivals.is_complete
        arrivals.add(came)
    assert found(arrivals, "a", "b", "c") == {"a": ("a", 2), "b": ("b", 1), "c": ("c.example.com", 1)}


def test_names_may_be_aliases():
    arrivals = arrivals_of(("10.0.0.7", 1), ("gpu", 1))
    arrivals.add(caller("node7", 0))
    arrivals.add(caller("node9", 1))
    assert found(arrivals, "10.0.0.7", "gpu") == {"10.0.0.7": ("node7", 1), "gpu": ("node9", 1)}


@pytest.mark.parametrize(
    ("came", "error"),
    [
        (("a", None), "a process on a has no rank: none of OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK"),
        (("b", 1), r"did not number its processes host by host \(rank 1 is the first on b\); try: leave out"),
        (("a", 0, 0, 4), "Open MPI started 4 processes on a, not 2; try: one name for each host"),
        (("b", 0), "put the ranks of host a on host b"),
    ],
)
def test_unexpected_ranks_are_errors(came, error):
    arrivals = arrivals_of(("a", 2), ("b", 2))
    arrivals.add(caller(*came))
    with pytest.raises(AgentFailed, match=error) as caught:
        arrivals.agent_of("a", 30)
    assert caught.value.exit_code == 69


@pytest.mark.parametrize("hosts", [(("a", 1), ("b", 1)), (("a", 1),)])
def test_two_processes_of_one_rank(hosts):
    arrivals = arrivals_of(*hosts)
    for _ in range(2):
        arrivals.add(caller("a", 0))
    with pytest.raises(
        AgentFailed, match=r"two processes claim rank 0, on a .*and on a .*: one is not of this job"
    ):
        arrivals.agent_of(hosts[-1][0], 30)
    assert arrivals.trouble is not None


def test_waiting_thread_gets_the_agent_after_the_last_arrival():
    arrivals = arrivals_of(("a", 1), ("b", 1))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(arrivals.agent_of("b", 30)))
    waiting.start()
    arrivals.add(caller("b", 1))
    assert not arrivals.is_complete
    arrivals.add(caller("a", 0))
    waiting.join(30)
    ((agent, count),) = found
    assert (agent.hostname, count, arrivals.is_complete) == ("b", 1, True)
    late = caller("a", None)
    arrivals.add(late)
    assert late.connection.socket.fileno() == -1
    assert arrivals.trouble is None
    assert agent.connection.socket.fileno() != -1
    arrivals.close()
    assert agent.connection.socket.fileno() == -1


def test_the_end_of_the_launcher_ends_the_waiting():
    arrivals = arrivals_of(("a", 2), ("b", 1))
    early = caller("a", 0)
    arrivals.add(early)
    arrivals.fail(LauncherFailed("mpirun ended", hint="this"))
    with pytest.raises(AgentFailed, match="host a: mpirun ended; try: this"):
        arrivals.agent_of("a", 30)
    assert early.connection.socket.fileno() == -1


def test_missing_agent_is_a_start_timeout():
    arrivals = arrivals_of(("a", 2), ("b", 1))
    arrivals.add(caller("a", 0))
    with pytest.raises(StartTimeout, match=r"the agents of only 1 of 2 hosts were connected within 0.01 s"):
        arrivals.agent_of("a", 0.01)
