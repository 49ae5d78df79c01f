"""Reports on connections to other hosts, and NCCL's answers."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvlaunch.agent.errands.observer import peers
from hvlaunch.telemetry.peers import host_peers

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
TCP = (
    HEAD
    + """\
   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 0200000A:8000 0300000A:9000 01 00000400:00000000 01:00000A00 00000007  1000        0 22 2 0 6400 4 30 10 1 -1
   2: 0200000A:8001 0400000A:9000 01 00000400:00000000 04:00000A00 00000009  1000        0 33 2 0 6400 4 30 10 1 -1
   3: 0200000A:8002 0500000A:9000 01 00000000:00000000 00:00000000 00000000  1000        0 44 1 0 20 4 30 10 -1
   4: 0200000A:8003 0600000A:9000 01 00000400:00000000 01:00000020 00000002  1000        0 55 2 0 400 4 30 10 1 -1
"""
)
TCP6 = (
    HEAD
    + """\
   0: 0000000000000000FFFF00000200000A:8004 0000000000000000FFFF00000700000A:9000 01 00000400:00000000 01:00000A00 00000008  1000        0 66 2
   1: 000080FE00000000FF005450D2C05FFE:8005 000080FE00000000FF005450D3C05FFE:9000 01 00000400:00000000 01:00000A00 00000008  1000        0 77 2
"""
)


def test_silent_peers_and_peers_that_do_not_read_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp").write_text(TCP)
    (tmp_path / "tcp6").write_text(TCP6)
    connections = peers._connections
    monkeypatch.setattr(peers, "_connections", lambda _folder: connections(str(tmp_path)))
    monkeypatch.setattr(peers, "_sockets", lambda _pid: ["22", "33", "44", "55", "66", "77", "11"])
    report = peers.answer({"workers": [(3, os.getpid())], "scratch": ""})
    assert report["unanswered"] == [
        (3, "10.0.0.3"),
        (3, "10.0.0.7"),
        (3, "fe80::5054:ff:fe5f:c0d3"),
    ]
    assert report["addresses"] == ["10.0.0.2", "fe80::5054:ff:fe5f:c0d2"]
    assert report["nccl"] is None
    monkeypatch.setattr(peers, "_sockets", lambda _pid: ["22"])
    assert peers.answer({"workers": [(3, os.getpid())], "scratch": ""})["unanswered"] == [(3, "10.0.0.3")]


def test_a_connection_of_this_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        report = peers.answer({"workers": [(0, os.getpid())], "scratch": ""})
        assert "127.0.0.1" in report["addresses"]
        assert not report["unanswered"]
        checked = host_peers("a", {**report, "pids": list(map(list, report["pids"])), "unanswered": []})
        assert checked is not None
        assert checked.ranks[os.getpid()] == 0


Serve = Callable[[dict[str, bytes]], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that speaks as NCCL does (src/ras/client_support.cc); returns its port."""
    opened: list[socket.socket] = []

    def talk(server: socket.socket, answers: dict[str, bytes]) -> None:
        with suppress(OSError):
            client, _ = server.accept()
            with client, client.makefile("rb") as lines:
                for line in lines:
                    words = line.decode().strip()
                    client.sendall(answers.get(words, b"ERROR: Unknown command %s\n" % words.encode()))
                    if words == "VERBOSE STATUS":
                        return

    def begin(answers: dict[str, bytes]) -> int:
        server = socket.create_server(("127.0.0.1", 0))
        opened.append(server)
        threading.Thread(target=talk, args=(server, answers), daemon=True).start()
        return int(server.getsockname()[1])

    yield begin
    for server in opened:
        server.close()


HELLO = {"CLIENT PROTOCOL 2": b"SERVER PROTOCOL 2\n", "TIMEOUT 3": b"OK\n"}


@pytest.mark.parametrize(
    "more", [{"SET FORMAT json": b"OK\n", "VERBOSE STATUS": b"{}\n"}, {"VERBOSE STATUS": b"NCCL version\n"}]
)
def test_nccl_may_answer_in_text_when_asked_for_json(serve: Serve, more: dict[str, bytes]) -> None:
    assert peers.ask_ras(serve({**HELLO, **more})) == more["VERBOSE STATUS"].decode()


@pytest.mark.parametrize("hello", [b"HTTP/1.1 400 Bad Request\r\n", b"x" * 1000, b""])
def test_another_server_on_the_port_is_left_alone(
    serve: Serve, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_RAS_SECONDS", 0)
    monkeypatch.setattr(peers, "_MORE_SECONDS", 0.5)
    assert (
        peers.ask_ras(serve({"CLIENT PROTOCOL 2": hello, **({} if hello else {"VERBOSE STATUS": b""})}))
        is None
    )


def test_a_free_port_or_another_users_server_gives_no_report() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            assert peers.ask_ras(port) is None
    assert peers.ask_ras(port) is None


def test_a_silent_server_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_RAS_SECONDS", 0)
    monkeypatch.setattr(peers, "_MORE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert peers.ask_ras(server.getsockname()[1]) is None
