"""The agent's end of relayed connections. The test is the driver, and the workers."""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hvlaunch.agent.wire.channel import DriverChannel
from hvlaunch.agent.wire.frames import RELAY_CHUNK as CHUNK
from hvlaunch.agent.wire.frames import RELAY_WINDOW as WINDOW
from hvlaunch.agent.wire.frames import Decoder
from hvlaunch.driver.links.agent_channel import PieceReader
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import PATIENCE, AgentProcess, python

Launch = Callable[..., AgentProcess]

_F_SETPIPE_SZ = 1031  # fcntl(2)
ALWAYS = {"candidates": [], "key": "k", "relay": "always"}


class Relayed:
    """A worker's connection, and the driver's end of it."""

    def __init__(self, agent: AgentProcess, sock: socket.socket, number: int) -> None:
        self.agent = agent
        self.socket = sock
        self.number = number

    def send(self, what: str, body: bytes = b"", **more: int) -> None:
        self.agent.send("relay", body, id=self.number, what=what, **more)

    def expect(self, what: str) -> bytes:
        return self.agent.expect("relay", id=self.number, what=what)[1]

    def read(self, size: int) -> bytes:
        """What the driver gets from the worker."""
        got = b""
        while len(got) < size:
            got += self.expect("data")
        return got

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Rig:
    """An agent that relays, and connections to it."""

    def __init__(self, agent: AgentProcess, stack: ExitStack) -> None:
        self.agent = agent
        self._stack = stack
        agent.hello(rendezvous=ALWAYS)
        self.reached = agent.expect("reached")[0]

    def knock(self) -> socket.socket:
        where = self.reached["address"], self.reached["relay_port"]
        return self._stack.enter_context(socket.create_connection(where, timeout=PATIENCE))

    def connect(self) -> Relayed:
        sock = self.knock()
        return Relayed(self.agent, sock, self.agent.expect("relay", what="open")[0]["id"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def rig(launch: Launch, stack: ExitStack) -> Rig:
    return Rig(launch(), stack)


def test_always_relays_without_trying(rig: Rig) -> None:
    port = rig.reached["relay_port"]
    assert rig.reached == {"type": "reached", "address": "127.0.0.1", "tried": [], "relay_port": port}


def test_auto_relays_if_no_address_answers(launch: Launch) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        agent = launch()
        agent.hello(rendezvous=ALWAYS | {"relay": "auto", "candidates": [("127.0.0.1", port)]})
        reached, _ = agent.expect("reached")
    assert (reached["address"], reached["tried"]) == ("127.0.0.1", ["127.0.0.1"])
    assert reached["relay_port"] is not None


def test_bytes_pass_in_both_directions(rig: Rig) -> None:
    one, other = rig.connect(), rig.connect()
    one.socket.sendall(b"from one")
    other.socket.sendall(b"from the other")
    assert (one.read(8), other.read(14)) == (b"from one", b"from the other")
    one.send("data", b"to one")
    other.send("data", b"to the other")
    assert (one.socket.recv(99), other.socket.recv(99)) == (b"to one", b"to the other")


def test_each_side_may_end_first_and_still_read(rig: Rig) -> None:
    worker, driver = rig.connect(), rig.connect()
    worker.socket.shutdown(socket.SHUT_WR)
    worker.expect("end")
    worker.send("data", b"x" * WINDOW)
    worker.send("close")
    assert len(worker.socket.makefile("rb").read()) == WINDOW

    driver.send("data", b"bye")
    driver.send("end")
    assert driver.socket.makefile("rb").read() == b"bye"
    driver.socket.sendall(b"not yet")
    assert driver.read(7) == b"not yet"
    driver.socket.close()
    driver.expect("end")


def test_reset_is_reported_and_late_frames_are_ignored(rig: Rig) -> None:
    connection = rig.connect()
    connection.reset()
    connection.expect("close")
    connection.send("data", b"late")
    for what in ("end", "close"):
        connection.send(what)
    connection.send("credit", bytes=1)
    rig.agent.send("ping")
    rig.agent.expect("pong")


def test_worker_blocks_while_the_relay_does_not_read(rig: Rig) -> None:
    """It fills its window and the kernel's buffers, and not the agent's memory."""
    connection = rig.connect()
    connection.socket.setblocking(False)
    sent = 0
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + 0.5:
        try:
            sent += connection.socket.send(b"x" * CHUNK)
            idle_since = time.monotonic()
        except BlockingIOError:
            rig.agent.receive(0.02)
    assert len(connection.read(WINDOW)) == WINDOW
    assert not [frame for frame in rig.agent.seen if frame[0]["type"] == "relay"]
    assert sent > WINDOW
    connection.send("credit", bytes=5)
    assert connection.read(5) == b"x" * 5


def test_a_worker_that_does_not_read_holds_its_credit(rig: Rig) -> None:
    connection = rig.connect()
    data = os.urandom(WINDOW)
    connection.send("data", data)
    reader = connection.socket.makefile("rb")
    assert reader.read(WINDOW // 2) == data[: WINDOW // 2]
    taken = rig.agent.expect("relay", what="credit")[0]["bytes"]
    assert taken >= WINDOW // 4
    connection.send("close")
    assert reader.read() == data[WINDOW // 2 :]


def test_memory_does_not_grow_while_the_driver_does_not_read(rig: Rig) -> None:
    """30 connections have 7.5 MB of credit, and all of it is there to be read."""
    connections = [rig.connect() for _ in range(30)]
    before = rig.agent.agent.memory_info().rss
    for connection in connections:
        connection.socket.setblocking(False)
    idle_since = time.monotonic()
    while time.monotonic() < idle_since + 0.5:
        for connection in connections:
            try:
                connection.socket.send(b"x" * WINDOW)
                idle_since = time.monotonic()
            except BlockingIOError:
                pass
        time.sleep(0.01)
    assert rig.agent.agent.memory_info().rss - before < 3 << 20
    for connection in connections:
        assert len(connection.read(WINDOW)) == WINDOW


def test_short_connections_wait_while_the_driver_does_not_read(rig: Rig) -> None:
    """The pipe and the listening socket hold some hundreds of them, and the agent's memory a few."""
    assert rig.agent.process.stdout is not None
    fcntl.fcntl(rig.agent.process.stdout, _F_SETPIPE_SZ, 4096)
    where = rig.reached["address"], rig.reached["relay_port"]
    count = 0
    with suppress(TimeoutError):
        while count < 5000:
            socket.create_connection(where, timeout=0.5).close()
            count += 1
    assert count < 1000
    rig.agent.send("ping")
    rig.agent.expect("pong")
    rig.connect()


def test_output_is_not_delayed_by_relayed_data(rig: Rig, tmp_path: Path) -> None:
    connections = [rig.connect() for _ in range(20)]
    for connection in connections:
        connection.socket.setblocking(False)
        connection.socket.send(b"x" * WINDOW)
    said = tmp_path / "said"
    rig.agent.start(python("import sys; print('hello', flush=True); open(sys.argv[1], 'x')", str(said)))
    wait_until(said.exists, "hello")
    rig.agent.read_output(6)
    relayed = sum(len(body) for header, body in rig.agent.seen if header["type"] == "relay")
    assert relayed < 20 * WINDOW


def test_when_the_driver_is_gone_connections_end(rig: Rig) -> None:
    connection = rig.connect()
    rig.agent.hang_up()
    assert connection.socket.makefile("rb").read() == b""
    assert rig.agent.status() == 0
    with pytest.raises(ConnectionRefusedError):
        rig.knock()


def test_connections_beyond_half_of_the_file_descriptors_wait(launch: Launch, stack: ExitStack) -> None:
    rig = Rig(launch(before="ulimit -n 40; "), stack)
    sockets = [rig.knock() for _ in range(60)]
    for number, sock in enumerate(sockets):
        sock.sendall(b"%d" % number)
    rig.agent.expect("relay", what="data", id=20)
    _, out, _ = rig.agent.run(["echo", "started"])
    assert out == b"started\n"
    served = 1
    rig.agent.send("relay", b"19", id=20, what="data")
    rig.agent.send("relay", id=20, what="close")
    while served < len(sockets):
        header, body = rig.agent.expect("relay", what="data")
        rig.agent.send("relay", body, id=header["id"], what="data")
        rig.agent.send("relay", id=header["id"], what="close")
        served += 1
    assert [sock.recv(99) for sock in sockets] == [b"%d" % number for number in range(60)]
    assert rig.agent.agent.cpu_percent(0.2) < 50


def test_workers_do_not_inherit_connections(rig: Rig) -> None:
    rig.connect()
    _, out, _ = rig.agent.run(python("import os; print(os.listdir('/proc/self/fd'))"))
    assert len(eval(out)) == 4  # 0, 1, 2 and the one that lists


class TestLanes:
    """The agent's channel: relayed frames and others take turns."""

    @pytest.fixture
    def pipe(self) -> Iterator[tuple[DriverChannel, int]]:
        read, write = os.pipe()
        yield DriverChannel(os.open(os.devnull, os.O_RDONLY), write), read
        os.close(read)
        os.close(write)

    def received(self, channel: DriverChannel, read: int) -> list[str]:
        decoder, reader = Decoder(), PieceReader(lambda noise: pytest.fail(f"noise: {noise!r}"))
        os.set_blocking(read, False)
        names: list[str] = []
        while True:
            try:
                data = os.read(read, 1 << 16)
            except BlockingIOError:
                return names
            names += [header["type"] for header, _ in decoder.feed(reader.feed(data))]
            channel.flush()

    def test_a_frame_waits_for_one_of_the_others_at_most(self, pipe: tuple[DriverChannel, int]) -> None:
        channel, read = pipe
        channel.send({"type": "output"}, b"x" * (1 << 18))  # more than the pipe holds
        channel.flush()
        for number in range(4):
            channel.send({"type": f"relayed {number}"}, relayed=True)
        for number in range(2):
            channel.send({"type": f"own {number}"})
        assert channel.relayed_frames == 4
        names = self.received(channel, read)
        assert names[0] == "output"
        assert names[1:5] == ["relayed 0", "own 0", "relayed 1", "own 1"]
        assert names[5:] == ["relayed 2", "relayed 3"]

    def test_what_was_sent_before_is_whole(self, pipe: tuple[DriverChannel, int]) -> None:
        channel, read = pipe
        while not channel.blocked:
            channel.send({"type": "a"}, b"x" * 999)
            channel.flush()
        channel.send({"type": "b"}, relayed=True)
        assert self.received(channel, read)[-1] == "b"
