"""The server as the driver has it: its calls, its start and its end."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvlaunch.rendezvous import RendezvousClosed, RendezvousError, StoreFull, ValueTooLarge
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.ipv6 import has_ipv6
from tests.unit.rendezvous.wire import TOKEN, Wire, get, put, transports

# The driver's own way


def test_the_driver_and_clients_share_one_store(server, wire):
    server.put("s", "k", b"from the driver")
    assert wire.ask("GET", "/s/k").body == b"from the driver"
    wire.ask("PUT", "/s/k", b"from a client")
    assert server.get("s", "k") == b"from a client"
    server.delete("s", "k")
    server.delete("s", "k")
    assert wire.ask("GET", "/s/k").status == 404
    assert server.get("s", "k") is None


def test_the_driver_waits_for_a_client(server, wire, until):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait, "s", "k", 60)
        until(lambda: server.stats().waiting == 1)
        wire.ask("PUT", "/s/k", b"v")
        assert waiting.result(20) == b"v"
    assert server.wait("s", "k", 0) == b"v"
    assert server.wait("s", "never", 0.01) is None
    assert server.stats().waiting == 0
    assert not server._calls._open


def test_the_driver_wakes_a_client(server, wire, until):
    wire.send(get("/-/get/s/k?wait=60"))
    until(lambda: server.stats().waiting == 1)
    server.put("s", "k", b"v")
    assert wire.read().body == b"v"


def test_the_store_s_errors_reach_the_driver(start):
    server = start(value=3, keys=1)
    with pytest.raises(ValueTooLarge):
        server.put("s", "k", b"1234")
    server.put("s", "k", b"123")
    with pytest.raises(StoreFull):
        server.put("s", "other", b"")


def test_stats(server, wire):
    wire.ask("PUT", "/s/k", b"abc")
    wire.ask("GET", "/s/none")
    wire.ask("GET", "/s/k", headers=b"")
    wire.ask("POST", "/s/k")
    stats = server.stats()
    assert (stats.requests, stats.unauthorized, stats.refused) == (4, 1, 1)
    assert (stats.connections, stats.keys, stats.size, stats.waiting) == (1, 1, 5, 0)
    assert (stats.dropped, stats.faults) == (0, 0)


def test_a_fault_ends_one_connection_and_is_counted(start, connect, monkeypatch):
    server = start()
    monkeypatch.setattr(server._store, "get", lambda scope, key: 1 / 0)
    wire = connect(server)
    wire.send(get("/s/k"))
    assert wire.at_end()
    assert connect(server).ask("PUT", "/-/x", b"").status == 404
    assert server.stats().faults == 1


# Start and end


def test_one_port_for_both_families(server, connect):
    assert connect(server, "127.0.0.1").ask("PUT", "/s/k", b"v").status == 200
    if not has_ipv6():
        pytest.skip("there is no IPv6 here")
    assert connect(server, "::1").ask("GET", "/s/k").body == b"v"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_address_only(start, connect, host):
    if host == "::1" and not has_ipv6():
        pytest.skip("there is no IPv6 here")
    server = start(host=host)
    assert connect(server, host).ask("GET", "/s/k").status == 404
    with pytest.raises(ConnectionRefusedError):
        Wire(server.port, "127.0.0.1" if host == "::1" else "127.0.0.2")


def test_a_taken_port_is_an_error(server):
    second = RendezvousServer(TOKEN, port=server.port)
    with pytest.raises(RendezvousError, match=f"port {server.port}: Address already in use") as caught:
        second.start()
    assert TOKEN not in str(caught.value)
    second.close()


def test_horovod_s_scopes_are_open_to_the_job_s_addresses(start, connect):
    server = start()
    server.put("global", "0", b"from the round before")
    assert connect(server).ask("GET", "/global/0", headers=b"").status == 401
    server.open_to_horovod({"global": 2, "local_a": 1}, {"127.0.0.1"}, 1)
    wire = connect(server)
    assert wire.ask("GET", "/global/0", headers=b"").status == 404
    assert wire.ask("PUT", "/global/0", b"v", headers=b"").status == 200
    assert wire.ask("GET", "/s/0", headers=b"").status == 401
    assert server.get("global", "0") == b"v"
    if has_ipv6():
        assert connect(server, "::1").ask("GET", "/global/0", headers=b"").status == 401
    server.open_to_horovod({"local_a": 1}, {"127.0.0.1", "::1"}, 2)
    assert server.keys("global") == []
    assert connect(server).ask("GET", "/global/0", headers=b"").status == 401
    assert wire.ask("GET", "/local_a/0", headers=b"").status == 404
    if has_ipv6():
        assert connect(server, "::1").ask("GET", "/local_a/0", headers=b"").status == 404


def test_a_subscriber_is_told_of_every_change(start, connect, until):
    server = start()
    told = []
    end = server.subscribe("s", lambda key, value, _: told.append((key, value)))
    server.put("s", "before any client", b"1")
    wire = connect(server)
    wire.ask("PUT", "/s/k", b"2")
    wire.ask("PUT", "/other/k", b"3")
    wire.ask("POST", "/-/put-many/s", b'[["a",1],["b",0]]\n4')
    wire.ask("DELETE", "/s/k")
    wire.ask("DELETE", "/s/k")
    server.delete_scope("s")
    expected = [("before any client", b"1"), ("k", b"2"), ("a", b"4"), ("b", b""), ("k", None)]
    assert told[:5] == expected
    assert sorted(told[5:]) == [("a", None), ("b", None), ("before any client", None)]
    end()
    end()
    server.put("s", "k", b"not told")
    assert len(told) == 8
    server.close()
    end()


def test_before_the_first_client_the_driver_needs_no_event_loop():
    code = """
import sys
from hvlaunch.rendezvous.serving import RendezvousServer
with RendezvousServer("t") as server:
    server.subscribe("s", lambda key, value, _: print(key, value.decode()))
    server.put("s", "k", b"v")
    server.open_to_horovod({"global": 1}, {"10.0.0.1"}, 3)
    assert server.wait("s", "k", 60) == server.get("s", "k") == b"v"
    assert server.wait("s", "absent", 0) is None
    server.stats()
    assert server.delete("s", "absent") is False
print(*sys.modules)
"""
    told, loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert told == "k v"
    assert not {"asyncio", "httptools", "uvloop"} & set(loaded.split())


def test_a_wait_that_began_before_the_first_client_ends(start, connect, until):
    server = start()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.wait, "s", "k", 60)
        until(lambda: server.stats().waiting == 1)
        connect(server).ask("PUT", "/s/k", b"v")
        assert waiting.result(20) == b"v"


def test_a_wait_without_clients_ends_with_the_server(start, until):
    server = start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait, "s", "k", 60)
        until(lambda: server.stats().waiting == 1)
        server.close()
        with pytest.raises(RendezvousClosed):
            waiting.result(20)


def test_calls_during_the_first_connection_are_done(start, connect):
    for _ in range(20):
        server = start()
        with ThreadPoolExecutor(4) as pool:
            putting = [pool.submit(server.put, "s", str(number), b"v") for number in range(50)]
            wires = [connect(server).send(put("/s/w", b"v")) for _ in range(4)]
            for future in putting:
                future.result(20)
            assert [wire.read().status for wire in wires] == [200] * 4
        assert len(server.keys("s")) == 51
        server.close()


def test_a_later_server_has_later_versions(start):
    versions = []
    for _ in range(2):
        server = start()
        server.put("s", "k", b"")
        versions.append(server._store.version)
        server.close()
    assert 0 < versions[0] < versions[1]


def test_health_and_metrics(server, wire):
    pytest.importorskip("prometheus_client")
    wire.ask("PUT", "/s/k", b"value")
    wire.ask("GET", "/s/k", headers=b"")
    health = wire.ask("GET", "/-/health")
    assert health.headers[b"content-type"] == b"application/json"
    told = json.loads(health.body)
    assert (told["status"], told["keys"], told["requests"], told["unauthorized"]) == ("ok", 1, 2, 1)
    metrics = wire.ask("GET", "/-/metrics")
    assert metrics.headers[b"content-type"].startswith(b"text/plain")
    lines = metrics.body.decode().splitlines()
    assert 'hvlaunch_rendezvous_requests_total{status="200"} 2.0' in lines
    assert 'hvlaunch_rendezvous_requests_total{status="401"} 1.0' in lines
    assert "hvlaunch_rendezvous_keys 1.0" in lines
    assert "hvlaunch_rendezvous_faults_total 0.0" in lines
    for place in ("/-/health", "/-/metrics"):
        assert wire.ask("GET", place, headers=b"").status == 401


def test_without_prometheus_client_metrics_are_501(server, wire, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert wire.ask("GET", "/-/metrics").status == 501


def test_an_unknown_address_is_an_error():
    with pytest.raises(RendezvousError, match=r"can't listen on 192\.0\.2\.1 port 0: "):
        RendezvousServer(TOKEN, host="192.0.2.1").start()


def test_it_starts_beside_a_running_event_loop(loop_kind):
    async def as_in_a_notebook():
        with RendezvousServer(TOKEN) as server:
            server.put("s", "k", b"v")
            return server.get("s", "k")

    assert asyncio.run(as_in_a_notebook()) == b"v"


def test_close_answers_waiting_clients_and_ends_everything(start, connect, until):
    threads_before = set(threading.enumerate())
    server = start()
    waiters = [connect(server).send(get("/-/get/s/k?wait=60")) for _ in range(20)]
    idle, partial = connect(server), connect(server)
    idle.ask("GET", "/s/k")
    partial.send(b"PUT /s/k HTTP/1.1\r\nContent-Le")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.wait, "s", "k", 60)
        until(lambda: server.stats().waiting == 21)
        server.close()
        with pytest.raises(RendezvousClosed):
            waiting.result(20)
    for waiter in waiters:
        response = waiter.read()
        assert response.status == 503
        assert response.headers[b"connection"] == b"close"
        assert waiter.at_end()
    assert idle.at_end()
    assert partial.at_end()
    with pytest.raises(ConnectionRefusedError):
        Wire(server.port)
    assert not set(threading.enumerate()) - threads_before


def test_close_does_not_wait_for_a_client_that_does_not_read(server_to_close, connect, until):
    server = server_to_close
    server.put("s", "k", b"x" * 8_000_000)
    connect(server).send(get("/s/k"))
    until(lambda: any(transport.get_write_buffer_size() for transport in transports(server)))
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 10


def test_calls_after_close_raise_and_close_may_be_repeated(server_to_close):
    server = server_to_close
    server.close()
    server.close()
    for call in (
        lambda: server.put("s", "k", b""),
        lambda: server.get("s", "k"),
        lambda: server.wait("s", "k", 60),
        server.stats,
    ):
        with pytest.raises(RendezvousClosed):
            call()


def test_calls_during_close_never_hang(start):
    for _ in range(20):
        server = start()

        def hammer(server=server):
            count = 0
            try:
                while True:
                    server.put("s", "k", b"%d" % count)
                    count += 1
            except RendezvousClosed:
                return count

        with ThreadPoolExecutor(4) as pool:
            counts = [pool.submit(hammer) for _ in range(4)]
            server.wait("s", "k", 20)
            server.close()
            assert all(isinstance(count.result(20), int) for count in counts)


def test_a_server_that_was_never_started_closes():
    server = RendezvousServer(TOKEN)
    server.close()
    with pytest.raises(RendezvousClosed):
        server.get("s", "k")


@pytest.fixture
def server_to_close(start):
    return start()


@pytest.mark.parametrize("module", ["serving", "client"])
def test_importing_is_cheap(module):
    code = f"import sys, hvlaunch.rendezvous.{module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"asyncio", "httptools", "uvloop", "paramiko", "rich"} & set(loaded)
