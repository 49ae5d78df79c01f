"""How long a client asks again where nobody answers, and what it makes of answers that are cut off."""

import json
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
    RendezvousUnreachable,
)
from hvlaunch.rendezvous.client import Client, Versioned
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate
from tests.unit.rendezvous.kept_server import KeptServer
from tests.unit.rendezvous.scripted import ok
from tests.unit.rendezvous.wire import TOKEN, Wire

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
