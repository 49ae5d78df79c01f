"""The client: values and waits, against the real server; and where it finds that."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvlaunch.rendezvous import (
    NoRendezvous,
    NotANumber,
    RendezvousClosed,
    RendezvousUnreachable,
    StoreFull,
    UnexpectedAnswer,
    ValueTooLarge,
    WaitTimeout,
)
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from tests.ipv6 import has_ipv6
from tests.unit.rendezvous.calls import calls
from tests.unit.rendezvous.scripted import ok
from tests.unit.rendezvous.wire import TOKEN


@pytest.fixture
def server(small_server):
    return small_server


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
    for call in calls(client):
        with pytest.raises(ValueError):
            call(scope, key)
    assert server.stats().requests == 0


def test_ipv6():
    if not has_ipv6():
        pytest.skip("there is no IPv6 here")
    with (
        RendezvousServer(TOKEN, host="::1") as server,
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
    ["", "a:1", "a", "http://a", "http://:1", "http://a:0", "http://a:70000", "http://a:x", "https://a:1/path", "ftp://a:1", "http://a:1/path",
     "http://u:p@a:1", "http://[::1:1", "http://::1:1", "http://a:1?x=1", "http://a:1#x"],
)  # fmt: skip
def test_what_is_no_address_of_a_rendezvous(url):
    with pytest.raises(NoRendezvous, match="is not the address of a rendezvous; try: https://HOST:PORT"):
        Client(url, TOKEN)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://a:1", ("a", 1)),
        ("https://a:1/", ("a", 1)),
        ("https://10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("http://[::1]:80", ("::1", 80)),
        ("https://[fe80::1%25eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(url, address):
    link = Client(url, TOKEN, certificate="sha256:" + "0" * 64)._requests
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
