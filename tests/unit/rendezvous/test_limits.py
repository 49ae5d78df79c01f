"""What one client may cost, on both event loops: sizes, slowness, silence, and answers that are not taken."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.rendezvous.wire import AUTH, get, transports


def test_a_large_head_is_431(start, connect):
    wire = connect(start(head=1000))
    wire.send(get("/s/k", AUTH + b"X: " + b"y" * 2000 + b"\r\n"))
    assert wire.read().status == 431
    assert wire.at_end()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_413_though_the_client_is_still_sending(start, connect, chunked):
    server = start(value=1000)
    wire = connect(server)
    size = 4_000_000
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % size
    wire.send(
        b"PUT /s/k HTTP/1.1\r\n"
        + AUTH
        + length
        + b"\r\n"
        + (b"%x\r\n" % size if chunked else b"")
        + b"x" * size
    )
    assert wire.read().status == 413
    assert wire.at_end()
    assert connect(server).ask("GET", "/s/k").status == 404
    assert server.stats().size == 0


def test_a_full_store_is_507_and_the_connection_lives(start, connect):
    wire = connect(start(keys=1))
    assert wire.ask("PUT", "/s/1", b"").status == 200
    assert wire.ask("PUT", "/s/2", b"").status == 507
    assert wire.ask("GET", "/s/1").status == 200


@pytest.mark.parametrize("begun", [b"GET", b"GET /s/k HTTP/1.1\r\n", b"PUT /s/k HTTP/1.1\r\nContent-Length: 5\r\n" + AUTH + b"\r\nab"])  # fmt: skip
def test_a_request_that_does_not_arrive_is_408(start, connect, begun):
    server = start(exchange=1.0)  # within which what has begun is there for sure
    wire = connect(server)
    wire.send(begun)
    assert wire.read().status == 408
    assert wire.at_end()
    assert server.stats().dropped == 1


def test_trickling_does_not_move_the_deadline(start, connect):
    server = start(exchange=1.0, idle=0.3, linger=0.1)
    idler = connect(server)
    idler.ask("GET", "/s/k")
    wire = connect(server)
    wire.send(b"GET /s/k HTTP/1.1\r\n")
    deadline = time.monotonic() + 20
    while server.stats().connections:
        assert time.monotonic() < deadline
        for trickling, bytes_ in ((wire, b"X: y\r\n"), (idler, b"\r\n")):
            with contextlib.suppress(OSError):  # dropped, as it should be
                trickling.send(bytes_)
        time.sleep(0.02)
    assert server.stats().dropped == 2


def test_a_connection_that_says_nothing_is_dropped(start, connect):
    wire = connect(start(exchange=0.1))
    assert wire.at_end()


def test_an_idle_connection_is_dropped(start, connect):
    server = start(idle=0.1)
    wire = connect(server)
    assert wire.ask("GET", "/s/k").status == 404
    assert wire.at_end()
    assert server.stats().dropped == 1


def test_a_long_poll_is_not_idle(start, connect):
    wire = connect(start(idle=0.05, exchange=1.0))
    wire.send(get("/-/get/s/k?wait=1.5"))
    assert wire.read().status == 404
    assert wire.at_end()


def test_idleness_counts_from_the_last_answer(start, connect):
    wire = connect(start(idle=2.0))
    began = time.monotonic()
    while time.monotonic() - began < 2.5:
        assert wire.ask("GET", "/s/k").status == 404
        time.sleep(0.05)


def test_a_client_that_does_not_read_is_not_buffered_for_and_is_dropped(start, connect, until):
    server = start(exchange=2.0)
    wire = connect(server)
    value = b"x" * 8_000_000
    server.put("s", "k", value)
    wire.send(get("/s/k") * 100)
    until(lambda: any(transport.get_write_buffer_size() for transport in transports(server)))
    largest = 0
    while server.stats().connections:
        largest = max([largest, *(transport.get_write_buffer_size() for transport in transports(server))])
        assert server.stats().requests <= 2
        time.sleep(0.002)
    assert 0 < largest <= 2 * len(value)
    assert server.stats().dropped == 1


def test_a_client_that_reads_late_gets_everything_in_order(server, connect, until):
    wire = connect(server)
    values = [bytes([number]) * 1_000_000 for number in range(20)]
    for number, value in enumerate(values):
        server.put("s", str(number), value)
    wire.send(b"".join(get(f"/s/{number}") for number in range(20)))
    until(lambda: any(transport.get_write_buffer_size() for transport in transports(server)))
    for value in values:
        assert wire.read().body == value
    assert wire.ask("GET", "/s/0").body == values[0]


def test_a_flood_behind_a_long_poll_is_not_read(server, connect, until):
    wire = connect(server)
    wire.send(get("/-/get/s/k?wait=60"))
    until(lambda: server.stats().waiting)
    count, request = 10_000, get("/s/other")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(wire.send, request * count)
        [connection] = server._traffic.open
        until(lambda: not connection._transport.is_reading())
        assert len(connection._reader.ready) * len(request) <= 2 * 256 * 1024
        server.put("s", "k", b"v")
        assert wire.read().body == b"v"
        for _ in range(count):
            assert wire.read().status == 404
        sending.result(20)


def test_others_are_served_beside_many_slow_clients(server, connect):
    server.expect(["127.0.0.1"])
    slow = [connect(server).send(b"PUT /s/k HTTP/1.1\r\nContent-Length: 100\r\n") for _ in range(200)]
    wire = connect(server)
    for number in range(100):
        assert wire.ask("PUT", "/s/k", b"%d" % number).status == 200
    assert server.stats().connections == len(slow) + 1


def test_too_many_connections_are_429(start, connect, until):
    server = start(connections=3, from_one_address=2)
    first, second = connect(server), connect(server)
    for wire in (first, second):
        assert wire.ask("GET", "/s/k").status == 404
    third = connect(server)
    answer = third.read()
    assert (answer.status, answer.body) == (429, b"too many connections\n")
    assert third.at_end()
    assert first.ask("GET", "/s/k").status == 404
    others = [connect(server, "127.0.0.2", own=True)]
    assert others[0].ask("GET", "/s/k").status == 404
    others.append(connect(server, "127.0.0.3", own=True))
    assert others[1].read().status == 429
    assert server.stats().turned_away == 2
    second.close()
    others[1].close()
    third.close()
    until(lambda: server.stats().connections == 2)
    assert connect(server).ask("GET", "/s/k").status == 404


def test_a_crowd_that_is_turned_away_does_not_stay(start, connect, until):
    server = start(connections=1, linger=60)
    wire = connect(server)
    assert wire.ask("GET", "/s/k").status == 404
    crowd = [connect(server) for _ in range(300)]
    until(lambda: server.stats().turned_away == 300)
    assert server.stats().connections <= 102
    assert wire.ask("GET", "/s/k").status == 404
    for one in crowd:
        one.close()
    until(lambda: server.stats().connections == 1)


def test_waits_that_are_called_off_leave_nothing(start, connect, until):
    server = start()
    wires = [
        connect(server).send(get(path))
        for path in ("/-/get/s/k?wait=60", "/-/watch/s?wait=60", "/-/watch/s/k?wait=60")
    ]
    wires.append(
        connect(server).send(
            b"POST /-/check/s?wait=60 HTTP/1.1\r\nContent-Length: 5\r\n" + AUTH + b'\r\n["k"]'
        )
    )
    until(lambda: server.stats().waiting == 4)
    for wire in wires:
        wire.close()
    until(lambda: server.stats().waiting == 0)


def test_the_last_answer_may_take_longer_than_the_goodbye(start, connect, until):
    server = start(linger=0.05)
    value = b"x" * 8_000_000
    server.put("s", "k", value)
    wire = connect(server).send(get("/s/k", AUTH + b"Connection: close\r\n"))
    until(lambda: any(transport.get_write_buffer_size() for transport in transports(server)))
    time.sleep(0.3)
    assert wire.read().body == value
    assert wire.at_end()


def test_a_client_that_does_not_hang_up_after_goodbye_is_cut_off(start, connect, until):
    server = start(linger=0.05)
    wire = connect(server).send(get("/s/k", AUTH + b"Connection: close\r\n"))
    assert wire.read().status == 404
    until(lambda: server.stats().connections == 0)
    assert server.stats().dropped == 0


def test_bodies_that_arrive_together_have_a_limit(start, connect, until):
    server = start(bodies=250_000)
    begun = b"PUT /s/k HTTP/1.1\r\nContent-Length: 200000\r\n" + AUTH + b"\r\n"
    first, second = (connect(server).send(begun + b"x" * 100_000) for _ in range(2))
    until(lambda: server._traffic.arriving.size == 200_000)
    third = connect(server).send(begun + b"x" * 100_000)
    assert third.read().status == 507
    assert third.at_end()
    second.close()
    until(lambda: server._traffic.arriving.size == 100_000)
    first.send(b"x" * 100_000)
    assert first.read().status == 200
    assert connect(server).ask("GET", "/s/k").body == b"x" * 200_000
    assert server._traffic.arriving.size == 0
