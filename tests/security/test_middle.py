"""One in the middle of a connection: reads it, changes it, says it once more. Between any two processes, here on one machine."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from queue import SimpleQueue

import pytest

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY, WORD_SIZE
from hvlaunch.mpi.calls import AgentCaller, CallListener
from hvlaunch.mpi.request import caller_command
from hvlaunch.rendezvous import RendezvousUnreachable
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate

TOKEN = "the-token-that-is-secret"
_BY_CHANCE = 4
"""Bytes of a word that what is encrypted may have."""
WORD = "the-word-that-lets-in"
KEY = Certificate()
HANDSHAKE = 2500  # bytes: more than either side's

Change = Callable[[bytearray], None]


def one_bit(data: bytearray) -> None:
    data[-1] ^= 1


class Middle:
    """Passes connections on to a port, and remembers what each side has said; `up` and `down` change what comes later."""

    def __init__(self, port: int, up: Change | None = None, down: Change | None = None) -> None:
        self.heard: list[bytearray] = []
        """What clients have said, for each connection."""
        self.answers: list[bytearray] = []
        self._port = port
        self._up, self._down = up, down
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self.heard.append(bytearray())
                self.answers.append(bytearray())
                for pump in (
                    (client, server, self.heard[-1], self._up),
                    (server, client, self.answers[-1], self._down),
                ):
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, heard: bytearray, change: Change | None) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                heard += data
                if change is not None and len(heard) > HANDSHAKE:
                    change(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()

    def everything(self) -> bytes:
        return b"".join(map(bytes, [*self.heard, *self.answers]))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(TOKEN, certificate=KEY) as one:
        yield one


def by(middle: Middle) -> Client:
    return Client(f"https://127.0.0.1:{middle.port}", TOKEN, certificate=KEY.fingerprint, timeout=20)


def test_a_request_can_not_be_read(server: RendezvousServer) -> None:
    with closing(Middle(server.port)) as middle, by(middle) as client:
        client.put("scope-that-is-secret", "key-that-is-secret", b"value-that-is-secret")
        assert client.get("scope-that-is-secret", "key-that-is-secret") == b"value-that-is-secret"
        assert len(middle.everything()) > 1000
        assert b"secret" not in middle.everything()
        assert b"Bearer" not in middle.everything()


def test_a_request_that_was_changed_is_not_done(server: RendezvousServer) -> None:
    with closing(Middle(server.port, up=one_bit)) as middle, by(middle) as client:
        with pytest.raises(RendezvousUnreachable):
            client.put("s", "k", b"v" * 10_000)
        assert middle.heard
    assert server.get("s", "k") is None


def test_an_answer_that_was_changed_is_not_believed(server: RendezvousServer) -> None:
    server.put("s", "k", b"v" * 10_000)
    with (
        closing(Middle(server.port, down=one_bit)) as middle,
        by(middle) as client,
        pytest.raises(RendezvousUnreachable),
    ):
        client.get("s", "k")


def test_a_request_that_was_recorded_is_not_done_again(server: RendezvousServer) -> None:
    with closing(Middle(server.port)) as middle, by(middle) as client:
        client.put("s", "k", b"v")
        recorded = bytes(middle.heard[0])
    server.delete("s", "k")
    with socket.create_connection(("127.0.0.1", server.port), 20) as again, contextlib.suppress(OSError):
        again.sendall(recorded)
        again.shutdown(socket.SHUT_WR)
        while again.recv(1 << 16):
            pass
    assert server.get("s", "k") is None


def test_an_impostor_of_the_rendezvous_learns_nothing() -> None:
    with RendezvousServer(TOKEN, certificate=Certificate()) as stranger:
        client = Client(f"https://127.0.0.1:{stranger.port}", TOKEN, certificate=KEY.fingerprint)
        with pytest.raises(RendezvousUnreachable, match="certificate"):
            client.put("s", "k", b"v")
        assert stranger.stats().requests == 0


# Agents that a launcher has started (--mpi, --srun, --jsrun):

PROGRAM = b"import os; os.write(2, b'ran ' + sealed.open(os.read(0, 100000))); os._exit(0)"


def call(port: int) -> "subprocess.Popen[bytes]":
    env = {**os.environ, ENTRY: WORD, CERTIFICATE: KEY.fingerprint, ADDRESSES: f"127.0.0.1 {port}"}
    return subprocess.Popen(
        caller_command((), sys.executable), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def give(caller: AgentCaller, command: bytes) -> None:
    """The program, long enough for one in the middle to wake up, and a first frame."""
    program = zlib.compress(PROGRAM + b"\n#" + os.urandom(4000).hex().encode())
    caller.connection.sendall(b"w" * WORD_SIZE + len(program).to_bytes(4, "big") + program)
    caller.connection.sendall(command)


@pytest.fixture
def callers() -> "SimpleQueue[AgentCaller]":
    return SimpleQueue()


@pytest.fixture
def listener(callers: "SimpleQueue[AgentCaller]") -> Iterator[CallListener]:
    with closing(CallListener(WORD, KEY, callers.put, host="127.0.0.1")) as one:
        yield one


def test_messages_of_agents_and_driver_are_encrypted(
    listener: CallListener, callers: "SimpleQueue[AgentCaller]"
) -> None:
    with closing(Middle(listener.port)) as middle:
        process = call(middle.port)
        caller = callers.get(timeout=60)
        give(caller, b"command-that-is-secret")
        assert process.communicate(timeout=60)[1] == b"ran command-that-is-secret"
        name = socket.gethostname().encode()
        for word in (WORD.encode(), b"command-that-is-secret", name):
            if word != name or len(name) > _BY_CHANCE:
                assert word not in middle.everything()
        caller.connection.socket.close()


def test_a_command_that_was_changed_is_not_run(
    listener: CallListener, callers: "SimpleQueue[AgentCaller]"
) -> None:
    with closing(Middle(listener.port, down=one_bit)) as middle:
        process = call(middle.port)
        caller = callers.get(timeout=60)
        with contextlib.suppress(OSError):
            give(caller, b"command")
        assert b"ran" not in process.communicate(timeout=60)[1]
        assert process.returncode == 1
        caller.connection.socket.close()


def test_a_replayed_call_is_refused(listener: CallListener, callers: "SimpleQueue[AgentCaller]") -> None:
    with closing(Middle(listener.port)) as middle:
        process = call(middle.port)
        caller = callers.get(timeout=60)
        recorded = bytes(middle.heard[0])
        give(caller, b"command")
        process.communicate(timeout=60)
        caller.connection.socket.close()
    with socket.create_connection(("127.0.0.1", listener.port), 20) as again, contextlib.suppress(OSError):
        again.sendall(recorded)
        again.shutdown(socket.SHUT_WR)
        while again.recv(1 << 16):
            pass
    assert callers.empty()
