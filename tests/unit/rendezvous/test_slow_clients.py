"""A thousand clients that never come to the point, and others who are served beside them."""

import resource
import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.unit.rendezvous.wire import AUTH, Wire, get

pytestmark = pytest.mark.timing

COUNT = 1000
BEGINNINGS = [
    b"",
    b"G",
    b"GET /s/k HTTP/1.1\r\nX: ",
    b"PUT /s/slow HTTP/1.1\r\nContent-Length: 1000\r\n" + AUTH + b"\r\n",
    b"PUT /s/slow HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + AUTH + b"\r\n3e8\r\n",
]


@pytest.fixture(autouse=True)
def _enough_files():
    """Each connection is two in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * COUNT + 500
    if soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            pytest.skip(f"only {hard} open files are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def slow_clients(port: int) -> Iterator[list[socket.socket]]:
    """Each has begun something."""
    with ExitStack() as stack:
        clients = []
        for number in range(COUNT):
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            clients[-1].sendall(BEGINNINGS[number % len(BEGINNINGS)])
        yield clients


def at_end(client: socket.socket) -> bool:
    try:
        return not client.recv(4096)
    except ConnectionResetError:
        return True


def rounds(wire: Wire, count: int) -> None:
    for number in range(count):
        value = b"%d" % number
        assert wire.ask("PUT", "/s/k", value).status == 200
        assert wire.ask("GET", "/s/k").body == value


def test_others_are_served_while_a_thousand_trickle(start, connect, until):
    server = start(exchange=60.0, unauthenticated=60.0)
    server.expect(["127.0.0.1"])
    with slow_clients(server.port) as clients, ThreadPoolExecutor(1) as pool:
        until(lambda: server.stats().connections == COUNT)
        serving = pool.submit(rounds, connect(server), 300)
        while not serving.done():
            for client in clients[2 :: len(BEGINNINGS)]:
                client.sendall(b"y")
        serving.result()
        assert connect(server).ask("GET", "/s/k").body == b"299"  # who comes later, too
        assert server.stats().connections == COUNT + 2
        assert server.stats().size < 100
    until(lambda: server.stats().connections == 2)
    assert server.stats().faults == 0


def test_all_thousand_are_dropped_and_long_polls_are_not(start, connect, until):
    server = start(exchange=2.0, unauthenticated=1.0, linger=0.1)
    server.expect(["127.0.0.1"])
    waiting = connect(server).send(get("/-/get/s/late?wait=60"))
    until(lambda: server.stats().waiting)
    with slow_clients(server.port) as clients, selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ, client)
        left = set(clients)
        while left:  # each is told 408, or hears the end
            for key, _ in selector.select():
                client = key.data
                if at_end(client):
                    selector.unregister(client)
                    left.discard(client)
        until(lambda: server.stats().connections == 1)
    stats = server.stats()
    assert (stats.dropped, stats.faults) == (COUNT, 0)
    connect(server).ask("PUT", "/s/late", b"v")
    assert waiting.read().body == b"v"
