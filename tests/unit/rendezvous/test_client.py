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
    NotANumber,
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
from hvlaunch.rendezvous.server import RendezvousServer
from hvlaunch.rendezvous.store import StoreLimits
from hvlaunch.rendezvous.traffic import TrafficLimits
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
    assert client.delete("s", "k")
    assert not client.delete("s", "k")
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


def test_add(client):
    assert client.add("s", "n", 5) == 5
    assert client.add("s", "n", -7) == -2
    assert client.get("s", "n") == b"-2"
    client.put("s", "n", b"41")
    assert client.add("s", "n", 1) == 42
    for value, amount in ((b"4_2", 1), (b"", 0), (b"9223372036854775807", 1)):
        client.put("s", "text", value)
        with pytest.raises(NotANumber, match="s/text: the "):
            client.add("s", "text", amount)


def test_append(client):
    client.append("s", "k", b"a")
    client.append("s", "k", b"\0b")
    assert client.get("s", "k") == b"a\0b"
    client.put("s", "k", b"x" * 2_999_999)
    client.append("s", "k", b"y")
    with pytest.raises(ValueTooLarge):
        client.append("s", "k", b"z")


def test_compare_and_set(client):
    absent = client.read("s", "k")
    assert absent.value is None
    done, first = client.compare_and_set("s", "k", b"1", absent.version)
    assert (done, first) == (True, client.read("s", "k"))
    assert first.value == b"1"
    assert client.compare_and_set("s", "k", b"2", absent.version) == (False, first)
    done, second = client.compare_and_set("s", "k", b"1", first.version)
    assert done
    assert second.version != first.version
    client.delete("s", "k")
    assert client.compare_and_set("s", "k", b"3", second.version) == (False, absent)


@pytest.mark.parametrize("version", ["", "x", "-1", "1&id=2", "\r\n"])
def test_a_version_that_is_none_is_an_error(client, version):
    with pytest.raises(UnexpectedAnswer):
        client.compare_and_set("s", "k", b"1", version)


def test_many_keys(client):
    client.put_many("s", {"a": b"1", "b/ä": b"", "c": b"\n\0"})
    assert client.get_many("s", ["c", "none", "b/ä", "a", "a"]) == [b"\n\0", None, b"", b"1", b"1"]
    assert client.get_many("s", []) == []
    client.put_many("s", {})
    assert client.keys("s") == ["a", "b/ä", "c"]
    assert client.count("s") == 3
    assert client.check("s", ["a", "c"])
    assert client.check("s", [])
    assert not client.check("s", ["a", "none"])
    client.delete_scope("s")
    client.delete_scope("s")
    assert (client.keys("s"), client.count("s")) == ([], 0)


def test_put_many_sets_all_or_nothing(client):
    with pytest.raises(ValueTooLarge):
        client.put_many("s", {"a": b"1", "b": b"x" * 3_000_001})
    with pytest.raises(StoreFull):
        client.put_many("s", {str(number): b"" for number in range(51)})
    assert client.keys("s") == []


def test_an_empty_key_is_a_mistake_of_the_caller(client):
    for call in (client.get_many, client.check, lambda *place: client.wait_all(*place, 1)):
        with pytest.raises(ValueError):
            call("s", ["a", ""])


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


def test_wait_all(server, client, until):
    client.put("s", "a", b"1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_all, "s", ["a", "b", "c"], 60)
        until(lambda: server.stats().waiting == 1)
        client.put("s", "c", b"1")
        client.delete("s", "a")
        client.put("s", "b", b"1")
        assert server.stats().waiting == 1
        client.put("s", "a", b"1")
        assert waiting.result(20) is None


def test_wait_all_tells_what_is_missing(client):
    client.put("s", "a", b"1")
    with pytest.raises(WaitTimeout, match="nobody set s/b, d within"):
        client.wait_all("s", ["a", "b", "d"], 0.05)


def test_watch_of_a_scope(server, client, until):
    client.put("s", "a", b"1")
    client.put("s", "b", b"2")
    first = client.watch("s", timeout=60)
    assert (first.values, first.complete) == ({"a": b"1", "b": b"2"}, True)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.watch, "s", since=first.version, timeout=60)
        until(lambda: server.stats().waiting == 1)
        client.put("other", "a", b"3")
        assert server.stats().waiting == 1
        client.delete("s", "a")
        second = watching.result(20)
    assert (second.values, second.complete) == ({"a": None}, False)
    client.put("s", "b", b"3")
    client.put("s", "c", b"4")
    third = client.watch("s", since=second.version, timeout=60)
    assert third.values == {"b": b"3", "c": b"4"}
    nothing = client.watch("s", since=third.version, timeout=0)
    assert (nothing.version, nothing.values) == (third.version, {})


def test_watch_of_a_key(server, client, until):
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.watch, "s", "k", timeout=60)
        until(lambda: server.stats().waiting == 1)
        client.put("s", "other", b"1")
        assert server.stats().waiting == 1
        client.put("s", "k", b"1")
        first = watching.result(20)
    assert first.values == {"k": b"1"}
    assert client.watch("s", "k", since=first.version, timeout=0.05).values == {}
    client.delete("s", "k")
    assert client.watch("s", "k", since=first.version, timeout=60).values == {"k": None}
    assert client.watch("s", "k", timeout=0).values == {}


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
        first = client._link.ask("POST", target, body)
        assert first.status == 200
        assert answer in (None, first)
        value = client.get("s", "k")
        assert client._link.ask("POST", target, body) == first
        assert client.get("s", "k") == value


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


def test_too_many_connections():
    limits = TrafficLimits(connections=1)
    with (
        RendezvousServer(TOKEN, PROBE_TOKEN, NONCE, traffic_limits=limits) as server,
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
    link = Client(url, TOKEN)._link
    assert (link._host, link._port) == address


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "tökén", "a\n"])
def test_a_token_that_can_t_be_sent_is_not_shown(token):
    with pytest.raises(NoRendezvous) as caught:
        Client("http://a:1", token)
    assert not token or token not in str(caught.value)


def test_the_package_has_the_client():
    import hvlaunch.rendezvous

    assert hvlaunch.rendezvous.Client is Client
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        hvlaunch.rendezvous.Server  # noqa: B018 (looking is the test)
