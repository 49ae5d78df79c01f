"""Workers that keep to themselves: what is seen of a process from outside, and when the driver is told."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvlaunch.agent import alone
from tests.unit.agent.harness import AgentProcess, python

MAPS = """
import mmap, os, socket, subprocess, sys
with open(sys.argv[1], "r+b") as file:
    library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
"""A program that has this file in its memory, as if it were a library."""
READY = "\nprint('ready', flush=True)\nsys.stdin.read()\n"
CHILD = """
code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
"""
Begin = Callable[..., int]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does much else may take longer than a second."""
    monkeypatch.setattr(alone, "_PATIENCE", 100.0)


@pytest.fixture
def library(tmp_path: Path) -> str:
    path = tmp_path / "libtorch_cpu.so"
    path.write_bytes(b"x")
    return str(path)


@pytest.fixture
def begin(library: str) -> Iterator[Begin]:
    """begin(code, file) starts a program, and gives its pid when it has done that."""
    started: list[subprocess.Popen[str]] = []

    def begin_program(code: str = "", file: str = library) -> int:
        command = [sys.executable, "-c", MAPS + code + READY, file]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        return one.pid

    yield begin_program
    for one in started:
        one.communicate()


@pytest.mark.parametrize(
    ("code", "has_met"),
    [
        ("", False),
        ("pair = socket.socketpair()", False),
        ("server = socket.create_server(('127.0.0.1', 0))", True),
        ("server = socket.create_server(('::1', 0), family=socket.AF_INET6)", True),
        (CHILD, True),
    ],
)
def test_a_connection_of_the_worker_or_its_child_is_seen(begin: Begin, code: str, has_met: bool) -> None:
    assert alone.look(begin(code)) == (has_met, "torch")


def test_a_connection_to_the_web_meets_no_worker(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [int(end[1:], 16) for end in alone._WEB] == [80, 443]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pid = begin(f"client = socket.create_connection(('127.0.0.1', {port}))")
        assert alone.look(pid) == (True, "torch")
        monkeypatch.setattr(alone, "_WEB", (f":{port:04X}",))
        assert alone.look(pid) == (False, "torch")


def test_a_process_without_such_a_library(begin: Begin, tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    other.write_bytes(b"x")
    assert alone.look(begin(file=str(other))) == (False, None)


def test_who_can_not_be_seen_may_have_met_others() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert alone.look(ended.pid) == (True, None)


def test_a_port_is_remembered_for_a_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert alone.was_used(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.shutdown(socket.SHUT_WR)
            server.accept()[0].close()
    assert alone.was_used(port)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert not alone.was_used(bound.getsockname()[1])


SERVER = "server = socket.create_server(('127.0.0.1', 0))"


def told_at_the_end(agent: AgentProcess, code: str, library: str, seconds: float, size: str) -> list[str]:
    """The libraries that the driver is told of when a worker that did this has ended well."""
    command = python(f"{MAPS}{code}\nimport time; time.sleep({seconds})", library)
    agent.start(command, own={"HVLAUNCH_SIZE": size})
    agent.expect("exited", code=0)
    return [header["library"] for header, _ in agent.seen if header["type"] == "alone"]


@pytest.mark.parametrize(
    ("code", "seconds", "size", "is_told"),
    [
        ("", 2.5, "2", True),
        pytest.param("", 0.8, "2", True, marks=pytest.mark.timing),  # as long as a small program of MPI takes
        ("", 2.5, "1", False),
        (SERVER, 2.5, "2", False),
    ],
)
def test_the_driver_is_told_when_it_ends_well(
    agent: AgentProcess, library: str, code: str, seconds: float, size: str, is_told: bool
) -> None:
    assert told_at_the_end(agent, code, library, seconds, size) == (["torch"] if is_told else [])


def test_a_single_process_of_mpi_listens_too(agent: AgentProcess, tmp_path: Path) -> None:
    library = tmp_path / "mpi4py" / "MPI.abi3.so"
    library.parent.mkdir()
    library.write_bytes(b"x")
    assert told_at_the_end(agent, SERVER, str(library), 2.5, "2") == ["mpi4py"]
