"""The server as clients meet it, on both event loops: order, tokens, long polls, many of them."""

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvlaunch.agent.wire.probe import Prover, reach
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.http import Answer
from hvlaunch.rendezvous.serving.routes import Verbs
from hvlaunch.rendezvous.serving.store_record import Once
from hvlaunch.rendezvous.store import Store
from tests.unit.rendezvous.wire import AUTH, TOKEN, Wire, get, put, transports

VERBS = list(Verbs(Store(), Once(), {name: lambda: Answer(200) for name in ("health", "metrics")})._verbs)

# Requests


def test_put_get_delete_on_one_connection(wire):
    assert wire.ask("GET", "/s/k").status == 404
    assert wire.ask("PUT", "/s/k", b"\0value\xff") == (200, {b"content-length": b"0"}, b"")
    assert wire.ask("GET", "/s/k") == (200, {b"content-length": b"7"}, b"\0value\xff")
    assert wire.ask("DELETE", "/s/k").status == 200
    assert wire.ask("GET", "/s/k").status == 404


def test_byte_by_byte(wire):
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in put("/s/k", b"slowly") + get("/s/k"):
        wire.send(bytes([byte]))
    assert wire.read().status == 200
    assert wire.read().body == b"slowly"


def test_pipelined_requests_are_answered_in_order(wire):
    wire.send(b"".join(put("/s/k", b"%d" % number) + get("/s/k") for number in range(500)))
    for number in range(500):
        assert wire.read().status == 200
        assert wire.read().body == b"%d" % number


def test_requests_wait_behind_a_long_poll(server, wire, connect, until):
    wire.send(get("/-/get/s/first?wait=60") + put("/s/second", b"2") + get("/s/second"))
    until(lambda: server.stats().waiting)
    other = connect(server)
    assert other.ask("GET", "/s/second").status == 404
    other.ask("PUT", "/s/first", b"1")
    assert [wire.read().body for _ in range(3)] == [b"1", b"", b"2"]


def test_a_client_that_puts_behind_its_own_long_poll_waits_it_out(wire):
    wire.send(get("/-/get/s/k?wait=0.05") + put("/s/k", b"v") + get("/-/get/s/k?wait=60"))
    assert [wire.read().status for _ in range(3)] == [404, 200, 200]


def test_chunked_bodies(wire):
    wire.send(b"PUT /s/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + AUTH + b"\r\n")
    for piece in (b"5\r\nhello\r\n", b"1;x=y\r\n \r\n", b"5\r\nworld\r\n", b"0\r\nTrailer: x\r\n\r\n"):
        wire.send(piece)
    assert wire.read().status == 200
    assert wire.ask("GET", "/s/k").body == b"hello world"


def test_a_waiting_client_is_asked_for_its_body(wire):
    wire.send(b"PUT /s/k HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n" + AUTH + b"\r\n")
    assert wire.file.readline() + wire.file.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"ab")
    assert wire.read().status == 200
    assert wire.ask("GET", "/s/k").body == b"ab"


def test_a_refused_body_is_not_asked_for(wire):
    wire.send(b"PUT /s/k HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert wire.read().status == 401
    assert wire.at_end()


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_537, 5_000_000])
def test_values_of_every_size_come_back_unchanged(wire, size):
    value = random.Random(size).randbytes(size)
    assert wire.ask("PUT", "/s/k", value).status == 200
    assert wire.ask("GET", "/s/k").body == value


def test_http_1_0(server, connect):
    wire = connect(server)
    wire.send(b"GET /s/k HTTP/1.0\r\nConnection: keep-alive\r\n" + AUTH + b"\r\n")
    assert wire.read().headers[b"connection"] == b"keep-alive"
    wire.send(b"GET /s/k HTTP/1.0\r\n" + AUTH + b"\r\n")
    assert wire.read().headers[b"connection"] == b"close"
    assert wire.at_end()


def test_a_half_closed_client_gets_its_answer(wire):
    wire.send(put("/s/k", b"v") + get("/s/k"))
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.read().status == 200
    assert wire.read().body == b"v"
    assert wire.at_end()


@pytest.mark.parametrize("method", ["HEAD", "POST", "OPTIONS"])
def test_other_methods_get_405_and_the_connection_lives(wire, method):
    wire.ask("PUT", "/s/k", b"secret")
    assert wire.ask(method, "/s/k", b"x").status == 405
    assert wire.ask("GET", "/s/k").body == b"secret"


def test_a_head_request_gets_no_body(wire):
    wire.send(b"HEAD /s/k HTTP/1.1\r\n" + AUTH + b"\r\n" + get("/-/count/s"))
    assert wire.read(no_body=True).status == 405
    assert wire.read().body == b"0"


@pytest.mark.parametrize(
    "request_",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nbroken\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n", b"\0"],
)  # fmt: skip
def test_after_a_malformed_request_the_connection_ends(server, wire, request_):
    wire.send(get("/s/k") + request_)
    assert wire.read().status == 404
    refusal = wire.read()
    assert refusal.status in (400, 501, 505)
    assert refusal.headers[b"connection"] == b"close"
    assert wire.at_end()
    assert server.stats().refused == 1


def test_answers_are_not_delayed_to_fill_packets(server, wire):
    wire.ask("GET", "/s/k")
    [transport] = transports(server)
    assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# Tokens


def test_401_on_every_route_is_counted(server, wire):
    wire.ask("PUT", "/s/k", b"secret")
    places = ["/s/k", "/-/health", "/-/get/s/k", "/-/get/s/k?wait=60", "/-/unknown", "/", "/s"]
    wrong = [b"", b"Authorization: Bearer wrong\r\n", b"Authorization: Basic " + TOKEN.encode() + b"\r\n"]
    for place in places:
        for method in ("GET", "PUT", "DELETE", "HEAD", "POST"):
            for headers in wrong:
                assert wire.ask(method, place, b"new", headers=headers).status == 401
    assert server.stats().unauthorized == len(places) * 5 * len(wrong)
    assert server.get("s", "k") == b"secret"


def test_an_agent_recognizes_the_server_by_the_key():
    found: list[int] = []

    def is_enough(number: int) -> bool:
        found.append(number)
        return False

    with (
        RendezvousServer(TOKEN, answerer=Prover("key", "rendezvous")) as server,
        RendezvousServer(TOKEN, answerer=Prover("another key", "rendezvous")) as other,
        RendezvousServer(TOKEN) as silent,
    ):
        targets = [("127.0.0.1", port) for port in (other.port, server.port, 1)]
        reach(targets, "key", "rendezvous", 20, is_enough)
        assert found == [1]
        assert server._loop is None  # who only asks needs no event loop
        Client(f"http://127.0.0.1:{server.port}", TOKEN).put("s", "k", b"v")
        assert server._loop is not None
        reach(targets, "key", "rendezvous", 20, is_enough)
        assert found == [1, 1]
        reach([("127.0.0.1", silent.port)], "key", "rendezvous", 20, found.append)
    assert found == [1, 1]


def test_an_unauthorized_body_is_not_read_and_the_connection_ends(server, wire, connect):
    assert wire.ask("PUT", "/s/k", b"x" * 50_000, headers=b"").status == 401
    assert wire.at_end()
    assert connect(server).ask("GET", "/s/k").status == 404


def test_an_authenticated_connection_survives_a_request_without_token(wire):
    assert wire.ask("GET", "/s/k").status == 404
    assert wire.ask("PUT", "/s/k", b"x" * 1_000_000, headers=b"").status == 401
    assert wire.ask("GET", "/s/k").status == 404


def test_no_place_opens_to_another_job_s_token(start, connect):
    server, other_job = start(), RendezvousServer("another-jobs-token")
    server.put("s", "k", b"secret")
    places = [f"/-/{verb}{names}" for verb in VERBS for names in ("", "/s", "/s/k")]
    places += ["/s/k", "/", "/-", "/s/k/more", "/-/unknown", "*"]
    asked = 0
    with other_job:
        other_job.put("s", "k", b"another")
        wire = connect(server)
        assert wire.ask("GET", "/s/k").body == b"secret"
        for headers in (b"", b"Authorization: Bearer another-jobs-token\r\n", b"Authorization: Basic x\r\n"):
            for place in places:
                for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
                    assert wire.ask(method, place, headers=headers).status == 401
                    asked += 1
        assert connect(other_job).ask("GET", "/s/k").status == 401
    assert server.stats().unauthorized == asked
    assert server.keys("s") == ["k"]


# Long polls


def test_a_long_poll_is_answered_when_the_key_is_set(server, connect, until):
    waiters = [connect(server).send(get("/-/get/s/k?wait=60")) for _ in range(50)]
    until(lambda: server.stats().waiting == 50)
    began = time.monotonic()
    connect(server).ask("PUT", "/s/k", b"now")
    assert {waiter.read().body for waiter in waiters} == {b"now"}
    assert time.monotonic() - began < 30


def test_an_expired_long_poll_is_404_and_forgotten(server, wire):
    wire.send(get("/-/get/s/k?wait=0.02"))
    assert wire.read().status == 404
    assert server.stats().waiting == 0
    assert wire.ask("PUT", "/s/k", b"v").status == 200
    assert wire.ask("GET", "/s/k").body == b"v"


def test_a_waiting_client_that_disconnects_is_forgotten(server, connect, until):
    wire = connect(server)
    wire.send(get("/-/get/s/k?wait=60"))
    until(lambda: server.stats().waiting == 1)
    wire.close()
    until(lambda: server.stats().waiting == 0 and server.stats().connections == 0)
    server.put("s", "k", b"v")


def test_a_chain_of_answers_is_no_recursion(server, connect, until):
    """Each client waits for a key, and has the next client's key in its pipeline."""
    server.expect(["127.0.0.1"])
    links = 250
    wires = [connect(server) for _ in range(links)]
    for number, wire in enumerate(wires):
        wire.send(get(f"/-/get/s/{number}?wait=60") + put(f"/s/{number + 1}", b"v"))
    until(lambda: server.stats().waiting == links)
    server.put("s", "0", b"v")
    assert server.wait("s", str(links), 20) == b"v"
    for wire in wires:
        assert (wire.read().body, wire.read().status) == (b"v", 200)


# Many clients


def test_many_clients_against_a_model(server, connect):
    """Each has keys of its own, for which its model is exact, and one that all write whole values to."""

    def run(seed):
        wire, dice, model = connect(server), random.Random(seed), {}
        for _ in range(150):
            key = f"/scope{seed % 3}/{seed}-{dice.randrange(5)}"
            action = dice.choice(["PUT", "GET", "DELETE", "wait", "shared"])
            if action == "PUT":
                model[key] = dice.randbytes(dice.choice([0, 10, 70_000]))
                assert wire.ask("PUT", key, model[key]).status == 200
            elif action == "DELETE":
                assert wire.ask("DELETE", key).status == 200
                model.pop(key, None)
            elif action == "shared":
                assert wire.ask("PUT", "/shared/k", bytes([seed]) * 1000).status == 200
                assert len(set(wire.ask("GET", "/shared/k").body)) == 1
            else:
                place = key if action == "GET" else f"/-/get{key}?wait=0.001"
                response = wire.ask("GET", place)
                expected = (200, model[key]) if key in model else (404, b"")
                assert (response.status, response.body) == expected
        return model

    with ThreadPoolExecutor(16) as pool:
        models = list(pool.map(run, range(16)))
    merged = {key: value for model in models for key, value in model.items()}
    for place, value in merged.items():
        _, scope, key = place.split("/")
        assert server.get(scope, key) == value
    assert server.stats().keys == len(merged) + (server.get("shared", "k") is not None)


def test_one_connection_per_request_as_horovod_does(server):
    """The pattern of a gloo full mesh: short polls, Content-Length: 0 on GET, and nobody closes but by count."""
    size = 4

    def request(method, key, body=b""):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            head = f"{method} /global/{key} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + AUTH + b"\r\n" + body)
            wire = Wire.__new__(Wire)
            wire.file = connection.makefile("rb")
            response = wire.read()
            wire.file.close()
            return response

    def worker(rank):
        assert request("PUT", f"rank_{rank}", b"host").status == 200
        for other in range(rank):
            assert request("GET", f"rank_{other}").status in (200, 404)
        assert request("PUT", str(rank), bytes([rank]) * 136 * (size - 1)).status == 200
        seen = []
        for other in range(size):
            while (response := request("GET", str(other))).status == 404:
                time.sleep(0.01)
            seen.append(response.body)
        return seen

    with ThreadPoolExecutor(size) as pool:
        for seen in pool.map(worker, range(size)):
            assert seen == [bytes([rank]) * 136 * (size - 1) for rank in range(size)]
    for rank in range(size):
        assert request("DELETE", str(rank)).status == 200
