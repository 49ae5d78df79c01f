"""The driver's end of relayed connections, with a real server and a played or real agent."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import RELAY_CHUNK as CHUNK
from hvlaunch.agent.wire.frames import RELAY_WINDOW as WINDOW
from hvlaunch.driver.links.relay import HostRelay, peer_name
from hvlaunch.rendezvous import RendezvousClosed
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess

AUTH = b"Authorization: Bearer token\r\n"


class Rig:
    """An agent without sockets. `sent` are the driver's frames, as (what, body, bytes)."""

    def __init__(self, rendezvous: Any) -> None:
        self.frames: SimpleQueue[tuple[Mapping[str, Any], bytes]] = SimpleQueue()
        self.relay = HostRelay("a", rendezvous, lambda header, body: self.frames.put((header, body)))

    def send(self, what: str, body: bytes = b"", number: int = 1, **more: int) -> None:
        self.relay.obey({"type": "relay", "id": number, "what": what, **more}, body)

    def next(self) -> tuple[str, bytes]:
        header, body = self.frames.get(timeout=60)
        assert header["type"] == "relay"
        return header["what"], body

    def read(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            what, body = self.next()
            assert what in ("data", "credit")
            got += body
        return got


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer("token") as server:
        yield server


@pytest.fixture
def rig(server: RendezvousServer) -> Rig:
    return Rig(server)


def request(method: str, path: str, body: bytes = b"", more: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n".encode()
    return head + AUTH + more + b"\r\n" + body


def test_requests_are_served_on_one_connection(rig: Rig, server: RendezvousServer) -> None:
    rig.send("open")
    rig.send("data", request("PUT", "/s/k", b"value"))
    assert rig.read(10).startswith(b"HTTP/1.1 200 OK")
    rig.send("data", request("GET", "/s/k")[:30])
    rig.send("data", request("GET", "/s/k")[30:])
    assert rig.read(10).endswith(b"\r\n\r\nvalue")
    assert server.get("s", "k") == b"value"


def test_connection_of_an_ended_worker_is_closed(rig: Rig, server: RendezvousServer) -> None:
    rig.send("open")
    rig.send("data", request("GET", "/s/k"))
    rig.send("end")
    assert rig.read(10).startswith(b"HTTP/1.1 404")
    assert rig.next() == ("close", b"")
    assert server.stats().connections == 0


def test_the_last_answer_of_a_connection_ends_it(rig: Rig, server: RendezvousServer) -> None:
    rig.send("open")
    rig.send("data", request("GET", "/s/k", more=b"Connection: close\r\n"))
    assert rig.read(10).startswith(b"HTTP/1.1 404")
    assert rig.next() == ("end", b"")
    rig.send("credit", bytes=10)
    rig.send("end")
    assert rig.next() == ("close", b"")
    assert server.stats().connections == 0


@pytest.mark.parametrize("how", ["close", "lost"])
def test_long_poll_of_a_lost_worker_is_cancelled(rig: Rig, server: RendezvousServer, how: str) -> None:
    rig.send("open")
    rig.send("data", request("GET", "/-/get/s/k?wait=60"))
    wait_until(lambda: server.stats().waiting == 1, "the server waits")
    if how == "lost":
        rig.relay.close()
    else:
        rig.send("close")
    wait_until(lambda: server.stats().connections == 0, "the connection is gone")
    assert server.stats().waiting == 0
    rig.send("data", b"late")
    rig.send("close")
    assert rig.frames.empty()
    assert server.stats().faults == 0


def test_a_large_answer_goes_by_credit(rig: Rig, server: RendezvousServer) -> None:
    value = bytes(range(256)) * 4096
    server.put("s", "k", value)
    rig.send("open")
    rig.send("data", request("GET", "/s/k"))
    got = rig.read(WINDOW)
    assert len(got) == WINDOW
    assert server.stats().faults == 0  # the server's thread has had its turn
    assert rig.frames.empty()
    while len(got) < len(value):
        rig.send("credit", bytes=CHUNK)
        got += rig.read(1)
    assert got.partition(b"\r\n\r\n")[2][: len(value)] == value[: len(got) - got.index(b"\r\n\r\n") - 4]


def test_a_large_value_is_taken_and_gives_credit(rig: Rig, server: RendezvousServer) -> None:
    value = bytes(range(256)) * 4096
    rig.send("open")
    data = request("PUT", "/s/k", value)
    for start in range(0, len(data), CHUNK):
        rig.send("data", data[start : start + CHUNK])
    credit = 0
    while (frame := rig.frames.get(timeout=60))[0]["what"] == "credit":
        credit += frame[0]["bytes"]
    assert frame[1].startswith(b"HTTP/1.1 200")
    assert len(data) - WINDOW // 4 < credit <= len(data)
    assert server.get("s", "k") == value


def test_paused_client_gives_no_credit(rig: Rig, server: RendezvousServer) -> None:
    """While a client waits for an answer, server and relay read at most one more request."""
    rig.send("open")
    rig.send("data", request("GET", "/-/get/s/k?wait=60"))
    wait_until(lambda: server.stats().waiting == 1, "the server waits")
    for _ in range(WINDOW // CHUNK):
        rig.send("data", (request("GET", "/s/k") * CHUNK)[:CHUNK])
    assert server.stats().faults == 0  # the server's thread has had its turn
    assert rig.frames.qsize() <= 1
    rig.send("close")


def test_the_server_ends_first(server: RendezvousServer) -> None:
    rig = Rig(server)
    rig.send("open")
    rig.send("data", request("GET", "/-/get/s/k?wait=60"))
    wait_until(lambda: server.stats().waiting == 1, "the server waits")
    server.close()
    assert rig.read(10).startswith(b"HTTP/1.1 503")
    assert rig.next() == ("close", b"")
    rig.send("data", b"more")
    rig.relay.close()
    with pytest.raises(RendezvousClosed):
        Rig(server).send("open")


def test_relayed_clients_have_their_host_as_peer_name() -> None:
    """No address looks like the peer name."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made: SimpleQueue[Any] = SimpleQueue()
    expected: list[str] = []

    class Server:
        def endpoint(self) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]:
            return loop, Faulty

        def expect(self, addresses: Iterable[str]) -> None:
            expected.extend(addresses)

    class Faulty(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.put(transport)

        def data_received(self, data: bytes) -> None:
            raise ValueError(data)

        def connection_lost(self, exc: Exception | None) -> None:
            made.put(exc)

    errors: SimpleQueue[Any] = SimpleQueue()
    loop.set_exception_handler(lambda _, context: errors.put(context["exception"]))
    rig = Rig(Server())
    rig.send("open")
    assert made.get(timeout=60).get_extra_info("peername")[0] == peer_name("a") == "relay:a"
    assert expected == ["relay:a"]
    rig.send("data", b"x")  # a fault of the server ends this connection, as asyncio's own transports have it
    assert rig.next() == ("close", b"")
    assert isinstance(made.get(timeout=60), ValueError)
    assert isinstance(errors.get(timeout=60), ValueError)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_many_workers_through_a_real_agent(server: RendezvousServer) -> None:
    """Values of every size, long polls and short connections at once; none may wait for ever."""
    agent = AgentProcess()
    agent.hello(rendezvous={"candidates": [], "key": "k", "relay": "always"})
    url = f"http://127.0.0.1:{agent.expect('reached')[0]['relay_port']}"
    outgoing = threading.Lock()

    def send(header: Mapping[str, Any], body: bytes) -> None:
        with outgoing:
            agent.send("relay", body, **{name: value for name, value in header.items() if name != "type"})

    relay = HostRelay("a", server, send)
    over = threading.Event()

    def work(number: int) -> bool:
        client = Client(url, "token")
        value = bytes([number]) * (1 << (2 * number % 23))
        client.put("s", f"key{number}", value)
        other = (number + 5) % 16
        found = client.wait("s", f"key{other}", 30)
        return found == bytes([other]) * (1 << (2 * other % 23)) == client.get("s", f"key{other}")

    def knock() -> None:
        where = url.removeprefix("http://").partition(":")
        for _ in range(50):
            with socket.create_connection((where[0], int(where[2]))):
                pass

    def pump() -> None:
        while not over.is_set():
            agent.receive(0.05)
            frames, agent.seen = agent.seen, []
            for header, body in frames:
                if header["type"] == "relay":
                    relay.obey(header, body)

    try:
        with ThreadPoolExecutor(18) as pool:
            pumping = pool.submit(pump)
            knocking = pool.submit(knock)
            try:
                assert all(pool.map(work, range(16), timeout=60))
                knocking.result(30)
                wait_until(lambda: server.stats().connections == 0, "all connections are gone")
            finally:
                over.set()
            pumping.result()
        assert server.stats().faults == 0
    finally:
        agent.end()
