"""A server on each event loop, raw sockets to it, and a client."""

import sys
from functools import partial
from typing import Any

import pytest

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.traffic import HttpLimits, TrafficLimits
from hvlaunch.rendezvous.store import StoreLimits
from tests.testhosts.places import wait_until
from tests.unit.rendezvous.scripted import Scripted
from tests.unit.rendezvous.wire import TOKEN, Wire


@pytest.fixture(params=["uvloop", "asyncio"])
def loop_kind(request, monkeypatch):
    if request.param == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)  # as where it is not installed
    else:
        pytest.importorskip("uvloop")
    return request.param


@pytest.fixture
def start(loop_kind):
    """start(head=…, idle=…, value=…): a running server; the keywords are limits."""
    servers = []

    def start_server(*, host: str = "", **limits: Any) -> RendezvousServer:
        stored = {name: limits.pop(name) for name in ("value", "total", "keys") if name in limits}
        store_limits = StoreLimits(**stored)
        traffic_limits = TrafficLimits(
            **{
                name: limits.pop(name)
                for name in ("connections", "from_one_address", "bodies")
                if name in limits
            }
        )
        # A client that shows no token would be dropped after ten seconds, however short `exchange` is.
        unauthenticated = min(10.0, limits.get("exchange", 10.0))
        http_limits = HttpLimits(**{"body": store_limits.value, "unauthenticated": unauthenticated, **limits})
        server = RendezvousServer(
            TOKEN,
            host=host,
            store_limits=store_limits,
            http_limits=http_limits,
            traffic_limits=traffic_limits,
        )
        servers.append(server)
        server.start()
        return server

    yield start_server
    for server in servers:
        server.close()


@pytest.fixture
def server(start):
    server = start()
    yield server
    assert server.stats().faults == 0


@pytest.fixture
def connect():
    """connect(server): a Wire to it; own: from an address that is `host`, too."""
    wires = []

    def connect_to(server: RendezvousServer, host: str = "127.0.0.1", *, own: bool = False) -> Wire:
        wires.append(Wire(server.port, host, source=host if own else ""))
        return wires[-1]

    yield connect_to
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(server, connect):
    return connect(server)


@pytest.fixture
def until():
    return partial(wait_until, what="the server is as expected", timeout=20.0)


@pytest.fixture
def small_server():
    """What a client may need, on one event loop: values of 3,000,000 bytes, and 50 keys."""
    limits = StoreLimits(value=3_000_000, keys=50)
    with RendezvousServer(TOKEN, store_limits=limits) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(f"http://127.0.0.1:{server.port}", TOKEN) as client:
        yield client


@pytest.fixture
def scripted():
    """scripted([answer, …], …): a server with these answers on each connection."""
    servers = []

    def make(*connections):
        servers.append(Scripted(*connections))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
