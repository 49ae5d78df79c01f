"""The client's connections, how long it asks again, and what it makes of servers that refuse, misbehave or do not answer."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from hvlaunch.rendezvous import (
    NoRendezvous,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    StoreFull,
    TooManyConnections,
    Unauthorized,
    UnexpectedAnswer,
    ValueTooLarge,
    WaitTimeout,
)
from hvlaunch.rendezvous import client as client_module
from hvlaunch.rendezvous.client import Client, Versioned
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.serving.traffic import TrafficLimits
from tests.unit.rendezvous.calls import calls
from tests.unit.rendezvous.kept_server import KeptServer
from tests.unit.rendezvous.scripted import ok
from tests.unit.rendezvous.wire import TOKEN, Wire

_TCP_REPAIR = 19


@pytest.fixture
def server(small_server):
    return small_server


# Connections


def test_one_connection_serves_many_requests(server, client):
    for number in range(50):
        client.put("s", "k", b"%d" % number)
    assert server.stats().connections == 1
    assert server.stats().requests == 50
    client.close()
    client.put("s", "k", b"usable after close")


def test_threads_share_a_client(server, client):
    def run(seed):
        for number in range(40):
            value = b"%d-%d" % (seed, number)
            client.put("s", str(seed), value)
            assert client.get("s", str(seed)) == value

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, range(16)))
    assert server.stats().requests == 16 * 40 * 2
    assert 1 <= server.stats().connections <= 16


@pytest.mark.parametrize("method", ["get", "put", "delete", "wait"])
def test_a_kept_connection_that_was_dropped_is_replaced(scripted, until, method):
    server = scripted([ok(b"1")], [ok(b"2")])
    client = Client(server.url, TOKEN)
    assert client.get("s", "k") == b"1"
    arguments: dict[str, list[object]] = {"put": [b"value"], "wait": [60]}
    more = arguments.get(method, [])
    getattr(client, method)("s", "k", *more)
    assert len(server.requests) == 2
    assert len(server.requests[1]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may forget a connection (TCP_REPAIR)")
def test_a_wait_ends_on_a_connection_that_the_server_has_no_more() -> None:
    """A firewall has reset it at the server's end; the client has nothing to send, and would never learn of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN)
        waits = pool.submit(client.wait, "s", "k", 60.0)
        forgotten, _ = listener.accept()
        assert b"GET" in forgotten.recv(4096)
        forgotten.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        forgotten.close()
        listener.settimeout(30.0)
        again, _ = listener.accept()
        with again:
            assert b"GET" in again.recv(4096)
            again.sendall(ok(b"1"))
            assert waits.result() == b"1"
        client.close()


@pytest.mark.parametrize(
    ("method", "more", "answer"),
    [
        ("add", [1], ok(b"1")),
        ("append", [b"x"], ok()),
        ("delete", [], ok()),
        ("compare_and_set", [b"x", "0"], ok().replace(b"\r\n\r\n", b'\r\nETag: "1"\r\n\r\n')),
    ],
)
def test_a_repeated_request_is_known_to_be_one(scripted, method, more, answer):
    server = scripted([ok(b"1"), b""], [answer])
    client = Client(server.url, TOKEN)
    client.get("s", "k")
    getattr(client, method)("s", "k", *more)
    [first] = server.requests[1]
    assert b"?id=" in first.split(b" ")[1]


def test_what_the_server_did_already_it_does_not_do_again(server, client):
    for path, body, answer in (
        ("add", b"5", (200, b"5", "")),
        ("append", b"x", (200, b"", "")),
        ("delete", b"", (200, b"", "")),
        ("compare", b"y", None),
    ):
        client.delete("s", "k")
        if path == "delete":
            client.put("s", "k", b"")
        target = f"/-/{path}/s/k?id={path}" + ("&version=0" if path == "compare" else "")
        first = client._requests.ask("POST", target, body)
        assert first.status == 200
        assert answer in (None, first)
        value = client.get("s", "k")
        assert client._requests.ask("POST", target, body) == first
        assert client.get("s", "k") == value


def test_a_new_connection_that_is_dropped_is_replaced_a_few_times(scripted, monkeypatch):
    """As the server does with the oldest of a crowd of strangers."""
    monkeypatch.setattr(client_module, "_PAUSES", (0.01, 0.01))
    assert Client(scripted([b""], [b""], [ok(b"3")]).url, TOKEN).get("s", "k") == b"3"
    server = scripted([ok(b"1")], [b""], [b""], [b""], [ok(b"5")])
    client = Client(server.url, TOKEN)
    client.get("s", "k")
    with pytest.raises(RendezvousUnreachable) as caught:
        client.get("s", "k")
    assert caught.value.url == server.url


def test_the_server_s_connection_close_is_obeyed(scripted):
    closing = ok(b"1").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    server = scripted([closing], [ok(b"2")])
    client = Client(server.url, TOKEN)
    assert [client.get("s", "k"), client.get("s", "k")] == [b"1", b"2"]


def test_a_server_that_does_not_answer_is_a_timeout_and_no_retry(scripted):
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, timeout=0.05)
        with pytest.raises(RendezvousUnreachable, match=r"no answer within 0\.05 s"):
            client.get("s", "k")
        listener.accept()[0].close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_timeout_on_a_kept_connection_is_no_retry(scripted):
    server = scripted([ok(b"1"), b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", ok(b"3")])
    client = Client(server.url, TOKEN)
    client.get("s", "k")
    client._requests._timeout = 0.1
    with pytest.raises(RendezvousUnreachable, match="no answer within"):
        client.get("s", "k")
    assert len(server.requests) == 1


def test_a_fork_does_not_share_connections(server, client):
    client.put("s", "k", b"parent")
    asked_read, asked_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(asked_write, client.get("s", "k") or b"?")
            client.wait("s", "seen by the parent", 60)
        finally:
            os._exit(0)
    assert os.read(asked_read, 100) == b"parent"
    assert server.stats().connections == 2
    client.put("s", "seen by the parent", b"")
    os.waitpid(child, 0)
    os.close(asked_read)
    os.close(asked_write)


# Refusals


def test_a_wrong_token(server):
    client = Client(f"http://127.0.0.1:{server.port}", "wrong")
    for call in calls(client):
        with pytest.raises(Unauthorized, match="unauthorized; try: check that HVLAUNCH_TOKEN") as caught:
            call("s", "k")
        assert caught.value.url == client.url
    assert server.stats().unauthorized == 4


def test_a_value_that_is_too_large(server, client):
    client.put("s", "k", b"x" * 3_000_000)
    with pytest.raises(ValueTooLarge):
        client.put("s", "k", b"x" * 3_000_001)
    assert client.get("s", "k") == b"x" * 3_000_000


def test_a_full_store(server, client):
    for number in range(50):
        client.put("s", str(number), b"")
    with pytest.raises(StoreFull, match="the rendezvous is full: it has 50 keys"):
        client.put("s", "one more", b"")


@pytest.mark.parametrize(
    "status", [b"301 Moved Permanently", b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect"]
)
def test_redirects_are_not_followed(scripted, status):
    target = scripted([ok(b"stolen")])
    redirect = b"HTTP/1.1 %s\r\nLocation: %s/s/k\r\nContent-Length: 0\r\n\r\n" % (status, target.url.encode())
    server = scripted([redirect] * 4)
    client = Client(server.url, TOKEN)
    for call in calls(client):
        with pytest.raises(UnexpectedAnswer, match="unexpected HTTP status 30") as caught:
            call("s", "k")
        assert caught.value.status == int(status[:3])
    assert target.requests == []
    assert len(server.requests) == 1


def test_no_proxy_is_asked(scripted, server, client, monkeypatch):
    proxy = scripted([ok(b"stolen")])
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    client.put("s", "k", b"v")
    assert client.get("s", "k") == b"v"
    assert proxy.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        f"HTTP/1.1 abc {TOKEN}\r\n\r\n".encode(),
        f"{TOKEN}\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_what_is_no_http_is_one_kind_of_error_and_the_token_stays_here(scripted, answer):
    server = scripted([answer])
    client = Client(server.url, TOKEN, timeout=5)
    with pytest.raises(RendezvousUnreachable) as caught:
        client.get("s", "k")
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value) + repr(caught.value) + repr(client)


def test_too_many_connections():
    limits = TrafficLimits(connections=1)
    with (
        RendezvousServer(TOKEN, traffic_limits=limits) as server,
        Client(f"http://127.0.0.1:{server.port}", TOKEN) as client,
    ):
        client.put("s", "k", b"")
        with pytest.raises(TooManyConnections, match="too many connections"):
            Client(client.url, TOKEN).get("s", "k")
        assert client.get("s", "k") == b""


def test_a_put_that_is_404_is_no_success(scripted):
    server = scripted([ok(status=b"404 Not Found")])
    with pytest.raises(UnexpectedAnswer):
        Client(server.url, TOKEN).put("s", "k", b"v")


def test_a_host_that_does_not_resolve_or_refuses():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        RendezvousUnreachable, match=f"rendezvous http://127.0.0.1:{port}: Connection refused"
    ):
        Client(f"http://127.0.0.1:{port}", TOKEN).get("s", "k")
    with pytest.raises(RendezvousUnreachable):
        Client("https://no-such-host.invalid:1", TOKEN, certificate="sha256:" + "0" * 64).get("s", "k")


def test_all_errors_are_of_one_tree():
    for kind in (
        NoRendezvous,
        RendezvousClosed,
        RendezvousUnreachable,
        StoreFull,
        Unauthorized,
        UnexpectedAnswer,
        WaitTimeout,
    ):
        assert issubclass(kind, RendezvousError)


LONG = 60.0


def no_answer(client: Client) -> float:
    """After how many seconds a request ends in vain."""
    began = time.monotonic()
    with pytest.raises(RendezvousUnreachable):
        client.get("s", "k")
    return time.monotonic() - began


@pytest.fixture
def nowhere():
    """The url of a port where nobody listens, and nobody else will."""
    with closing(socket.socket()) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{kept.getsockname()[1]}"


def test_nobody_is_asked_again_without_a_lease_and_somebody_is_as_long_as_it_lasts(nowhere):
    assert no_answer(Client(nowhere, TOKEN)) < 10
    assert no_answer(Client(nowhere, TOKEN, lease=0.4)) >= 0.4


def test_a_wait_asks_no_longer_than_it_would_wait(nowhere):
    client = Client(nowhere, TOKEN, lease=LONG)
    began = time.monotonic()
    with pytest.raises(RendezvousUnreachable):
        client.wait("s", "k", 0.3)
    assert 0.3 <= time.monotonic() - began < LONG / 2


def test_the_lease_begins_with_the_first_failure(scripted):
    """And with each anew: who has answered meanwhile is there."""
    server = scripted([ok(b"1")], [ok(b"2")])
    client = Client(server.url, TOKEN, lease=0.3)
    client.get("s", "k")
    time.sleep(0.4)
    assert client.get("s", "k") == b"2"


def test_a_server_that_is_silent_is_asked_again(scripted):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, timeout=0.2, lease=LONG)
        answer = pool.submit(client.get, "s", "k")
        silent, _ = listener.accept()
        second, _ = listener.accept()
        with silent, second:
            second.recv(65536)
            second.sendall(ok(b"v"))
            assert answer.result(20) == b"v"


def test_a_request_that_comes_again_has_the_same_id(scripted):
    server = scripted([ok(b"1")[:-1]], [ok(b"1")])
    assert Client(server.url, TOKEN, lease=LONG).add("s", "k", 1) == 1
    [first], [second] = server.requests
    assert first.partition(b"\r\n")[0] == second.partition(b"\r\n")[0]
    assert b"?id=" in first


def test_a_server_with_another_certificate_is_not_asked_again(tmp_path):
    with RendezvousServer(TOKEN, certificate=Certificate()) as server:
        url = f"https://127.0.0.1:{server.port}"
        client = Client(url, TOKEN, certificate="sha256:" + "0" * 64, lease=LONG)
        assert no_answer(client) < LONG / 2


def test_a_server_that_says_it_has_ended_is_not_asked_again():
    with RendezvousServer(TOKEN) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            Client(f"http://127.0.0.1:{server.port}", TOKEN, lease=LONG).wait, "s", "k", LONG
        )
        while not server.stats().waiting:
            pass
        server.close()
        with pytest.raises(RendezvousClosed):
            waiting.result(LONG / 2)


def test_an_answer_that_is_cut_off_anywhere_is_none(scripted):
    with RendezvousServer(TOKEN) as server, closing(Wire(server.port)) as wire:
        server.put("s", "k", b"value")
        wire.send(b"GET /-/read/s/k HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode())
        whole = wire.socket.recv(65536)
    assert whole.endswith(b"value")
    cut = [whole[:size] for size in range(1, len(whole))]
    client = Client(scripted(*([answer] for answer in cut)).url, TOKEN)
    for answer in cut:
        with pytest.raises(RendezvousUnreachable):
            pytest.fail(f"{client.read('s', 'k')} for {answer!r}")
    version = whole.partition(b'"')[2].partition(b'"')[0].decode()
    assert Client(scripted([whole]).url, TOKEN).read("s", "k") == Versioned(b"value", version)


@pytest.mark.parametrize("text", ["", "0", "1.5"])
def test_a_worker_s_lease_is_in_its_environment(text):
    environ = {"HVLAUNCH_RENDEZVOUS": "http://127.0.0.1:1", "HVLAUNCH_TOKEN": TOKEN, "HVLAUNCH_LEASE": text}
    assert Client.from_environment(environ).lease == float(text or "0")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_lease_that_is_no_number_of_seconds(text):
    environ = {"HVLAUNCH_RENDEZVOUS": "http://127.0.0.1:1", "HVLAUNCH_TOKEN": TOKEN, "HVLAUNCH_LEASE": text}
    with pytest.raises(NoRendezvous, match="HVLAUNCH_LEASE is "):
        Client.from_environment(environ)


WAITS: dict[str, Callable[[Client], object]] = {
    "wait": lambda client: client.wait("s", "k", LONG),
    "wait all": lambda client: client.wait_all("s", ["there", "k"], LONG),
    "watch": lambda client: client.watch("s", "k", since=0, timeout=LONG).values,
}


def test_what_waits_when_the_server_is_killed_waits_on(tmp_path):
    made = Certificate()
    (tmp_path / "key.pem").write_bytes(made.key + made.pem)
    server = KeptServer(tmp_path / "store", tmp_path / "key.pem")
    client = Client(f"http://127.0.0.1:{server.port}", TOKEN, lease=LONG)
    client.put("s", "there", b"")
    with ThreadPoolExecutor(len(WAITS)) as pool:
        waiting = {name: pool.submit(wait, client) for name, wait in WAITS.items()}
        with closing(Wire(server.port)) as wire:
            while json.loads(wire.ask("GET", "/-/health").body)["waiting"] < len(WAITS):
                pass
        server.kill()
        threading.Timer(0.2, server.begin).start()
        client.put("s", "k", b"v")
        found = {name: future.result(LONG) for name, future in waiting.items()}
    assert found == {"wait": b"v", "wait all": None, "watch": {"k": b"v"}}
    server.kill()
