"""The client: against the real server, and against servers that misbehave."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.errors import (
    NoRendezvous,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    StoreFull,
    Unauthorized,
    UnexpectedAnswer,
    ValueTooLarge,
    WaitTimeout,
)
from hvlaunch.rendezvous.server import RendezvousServer
from hvlaunch.rendezvous.store import StoreLimits
from tests.unit.rendezvous.wire import NONCE, PROBE_TOKEN, TOKEN


@pytest.fixture
def server():
    with RendezvousServer(
        TOKEN, PROBE_TOKEN, NONCE, store_limits=StoreLimits(value=3_000_000, keys=50)
    ) as server:
        yield server


@pytest.fixture
def client(server):
    with Client(f"http://127.0.0.1:{server.port}", TOKEN) as client:
        yield client


class Scripted:
    """A server that gives each connection its list of answers, b"" for hanging up unasked, and keeps what it was sent."""

    def __init__(self, *connections: list[bytes]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[list[bytes]] = []
        self._scripts = connections
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for script in self._scripts:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            seen: list[bytes] = []
            self.requests.append(seen)
            with connection:
                connection.settimeout(20)
                for answer in script:
                    request = b""
                    while answer and b"\r\n\r\n" not in request:
                        more = connection.recv(65536)
                        if not more:
                            break
                        request += more
                    if request:
                        seen.append(request)
                    connection.sendall(answer)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(20)


@pytest.fixture
def scripted():
    servers = []

    def make(*connections):
        servers.append(Scripted(*connections))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def ok(body=b"", status=b"200 OK"):
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


# Values


def test_put_get_delete(client):
    assert client.get("s", "k") is None
    client.put("s", "k", b"\0\xff")
    assert client.get("s", "k") == b"\0\xff"
    client.put("s", "k", b"")
    assert client.get("s", "k") == b""
    client.delete("s", "k")
    client.delete("s", "k")
    assert client.get("s", "k") is None


@pytest.mark.parametrize(
    "name",
    ["a/b", "..", ".", "--", "ä €", "%41", "a?b#c", "a\r\nb", "\0", "x" * 2000, "default_pg/0//cpu//0"],
)
def test_every_name_is_a_place_of_its_own(server, client, name):
    client.put(name, name, name.encode())
    assert client.get(name, name) == name.encode()
    assert client.wait(name, name, 0) == name.encode()
    assert server.get(name, name) == name.encode()
    assert server.stats().keys == 1


@pytest.mark.parametrize(("scope", "key"), [("", "k"), ("s", ""), ("-", "k"), ("s", "\udcff")])
def test_what_is_no_name_is_a_mistake_of_the_caller(server, client, scope, key):
    for call in (
        client.get,
        client.delete,
        lambda *place: client.put(*place, b""),
        lambda *place: client.wait(*place, 1),
    ):
        with pytest.raises(ValueError):
            call(scope, key)
    assert server.stats().requests == 0


def test_ipv6():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this kernel has no IPv6")
    with (
        RendezvousServer(TOKEN, PROBE_TOKEN, NONCE) as server,
        Client(f"http://[::1]:{server.port}", TOKEN) as client,
    ):
        client.put("s", "k", b"v")
        assert client.get("s", "k") == b"v"


# Waiting


def test_wait_returns_what_is_put_meanwhile(server, client, until):
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(client.wait, "s", "k", 60) for _ in range(8)]
        until(lambda: server.stats().waiting == 8)
        client.put("s", "k", b"v")
        assert [wait.result(20) for wait in waiting] == [b"v"] * 8


def test_wait_has_an_end(client):
    with pytest.raises(WaitTimeout, match=r"nobody set s/k within 0\.05 s") as caught:
        client.wait("s", "k", 0.05)
    error = caught.value
    assert (error.scope, error.key, error.seconds, error.url) == ("s", "k", 0.05, client.url)


def test_a_wait_may_be_longer_than_the_timeout_of_other_requests(server, until):
    client = Client(f"http://127.0.0.1:{server.port}", TOKEN, timeout=0.3)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(client.wait, "s", "k", 60)
        until(lambda: time.monotonic() - began > 0.8)
        server.put("s", "k", b"v")
        assert waiting.result(20) == b"v"


def test_a_wait_asks_again_where_the_server_waits_less(scripted):
    server = scripted([ok(status=b"404 Not Found"), ok(status=b"404 Not Found"), ok(b"v")])
    assert Client(server.url, TOKEN).wait("s", "k", 60) == b"v"
    [requests] = server.requests
    assert all(request.startswith(b"GET /-/get/s/k?wait=") for request in requests)
    assert len(requests) == 3


def test_a_wait_ends_when_the_server_does(server, client, until):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait, "s", "k", 60)
        until(lambda: server.stats().waiting == 1)
        server.close()
        with pytest.raises(RendezvousClosed, match="the rendezvous has ended"):
            waiting.result(20)
    with pytest.raises(RendezvousUnreachable, match="Connection refused"):
        client.get("s", "k")


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
    more = {"put": [b"value"], "wait": [60]}.get(method, [])
    getattr(client, method)("s", "k", *more)
    assert len(server.requests) == 2
    assert len(server.requests[1]) == 1


def test_it_is_replaced_only_once(scripted):
    server = scripted([ok(b"1")], [b""], [ok(b"3")])
    client = Client(server.url, TOKEN)
    client.get("s", "k")
    with pytest.raises(RendezvousUnreachable):
        client.get("s", "k")


def test_a_new_connection_that_is_dropped_is_not_replaced(scripted):
    server = scripted([b""], [ok(b"2")])
    with pytest.raises(RendezvousUnreachable) as caught:
        Client(server.url, TOKEN).get("s", "k")
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
    client = Client(server.url, TOKEN, timeout=0.1)
    client.get("s", "k")
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
    for call in (
        client.get,
        client.delete,
        lambda *place: client.put(*place, b""),
        lambda *place: client.wait(*place, 1),
    ):
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
    with pytest.raises(StoreFull, match="there are 50 keys already"):
        client.put("s", "one more", b"")


@pytest.mark.parametrize(
    "status", [b"301 Moved Permanently", b"302 Found", b"307 Temporary Redirect", b"308 Permanent Redirect"]
)
def test_redirects_are_not_followed(scripted, status):
    target = scripted([ok(b"stolen")])
    redirect = b"HTTP/1.1 %s\r\nLocation: %s/s/k\r\nContent-Length: 0\r\n\r\n" % (status, target.url.encode())
    server = scripted([redirect] * 4)
    client = Client(server.url, TOKEN)
    for call in (
        client.get,
        client.delete,
        lambda *place: client.put(*place, b""),
        lambda *place: client.wait(*place, 1),
    ):
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
        Client("http://no-such-host.invalid:1", TOKEN).get("s", "k")


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


# The environment


def test_from_environment(server):
    environ = {"HVLAUNCH_RENDEZVOUS": f"http://127.0.0.1:{server.port}", "HVLAUNCH_TOKEN": TOKEN}
    with Client.from_environment(environ) as client:
        client.put("s", "k", b"v")
    assert server.get("s", "k") == b"v"


def test_from_the_process_s_own_environment(server, monkeypatch):
    monkeypatch.setenv("HVLAUNCH_RENDEZVOUS", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HVLAUNCH_TOKEN", TOKEN)
    assert Client.from_environment().get("s", "k") is None


@pytest.mark.parametrize("missing", ["HVLAUNCH_RENDEZVOUS", "HVLAUNCH_TOKEN"])
@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named(missing, value):
    environ = {"HVLAUNCH_RENDEZVOUS": "http://a:1", "HVLAUNCH_TOKEN": TOKEN}
    if value is None:
        del environ[missing]
    else:
        environ[missing] = value
    with pytest.raises(NoRendezvous, match=f"{missing} is not set; try: start this program with hvlaunch"):
        Client.from_environment(environ)


@pytest.mark.parametrize(
    "url",
    ["", "a:1", "a", "http://a", "http://:1", "http://a:0", "http://a:70000", "http://a:x", "https://a:1", "ftp://a:1", "http://a:1/path",
     "http://u:p@a:1", "http://[::1:1", "http://::1:1", "http://a:1?x=1", "http://a:1#x"],
)  # fmt: skip
def test_what_is_no_address_of_a_rendezvous(url):
    with pytest.raises(NoRendezvous, match="is no address of a rendezvous; try: http://HOST:PORT"):
        Client(url, TOKEN)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:1", ("a", 1)),
        ("http://a:1/", ("a", 1)),
        ("http://10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("http://[::1]:80", ("::1", 80)),
        ("http://[fe80::1%25eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(url, address):
    client = Client(url, TOKEN)
    assert (client._host, client._port) == address


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "tökén", "a\n"])
def test_a_token_that_can_t_be_sent_is_not_shown(token):
    with pytest.raises(NoRendezvous) as caught:
        Client("http://a:1", token)
    assert not token or token not in str(caught.value)
