"""A driver that has no file descriptor left: it waits without spinning, says so, and serves the job once there is one."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from hvlaunch.rendezvous.client import Client

TOKEN = "the-jobs-token"

# It sleeps for a second: the CPU time of a second without descriptors is what is tested.
SERVER = f"""
import os, resource, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from hvlaunch.agent.wire.probe import Prover
from hvlaunch.rendezvous.serving import RendezvousServer
told, taken = [], []
with RendezvousServer({TOKEN!r}, answerer=Prover("key", "rendezvous"), say=told.append) as server:
    print(server.port, flush=True)
    for line in sys.stdin:
        if line == "take\\n":
            try:
                while True:
                    taken.append(os.dup(0))
            except OSError:
                began = time.process_time()
        elif line == "wait\\n":
            while not told:
                time.sleep(0.01)
            time.sleep(1)
            print(time.process_time() - began, len(told), *told, flush=True)
            continue
        elif line == "free\\n":
            for _ in range(int(sys.argv[1])):
                os.close(taken.pop())
        print("done", flush=True)
"""


class Server:
    """In a process of its own, which may have 64 files open and can be told to take them all."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.port = int(self._stdout.readline())

    def ask(self, order: str) -> str:
        self._stdin.write(f"{order}\n")
        self._stdin.flush()
        return self._stdout.readline().strip()

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", TOKEN)


@pytest.fixture
def server() -> Iterator[Server]:
    words = [sys.executable, "-c", SERVER, "1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def test_before_the_first_client(server: Server) -> None:
    assert server.ask("take") == "done"
    with closing(socket.create_connection(("127.0.0.1", server.port), 60)) as worker:
        worker.sendall(f"GET /s/k HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        cpu, count, words = server.ask("wait").split(" ", 2)
        assert float(cpu) < 0.5
        assert count == "1"
        assert words.startswith(
            "no file descriptor is left in hvlaunch (the limit is 64): clients of the rendezvous wait"
        )
        assert server.ask("free") == "done"
        assert worker.recv(99).startswith(b"HTTP/1.1 404")


def test_unauthenticated_clients_that_hold_all_descriptors_are_evicted(server: Server) -> None:
    with closing(server.client()) as early:
        early.put("s", "k", b"value")
        with ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), 60))
            with closing(server.client()) as late:
                assert late.get("s", "k") == b"value"
            assert early.get("s", "k") == b"value"
