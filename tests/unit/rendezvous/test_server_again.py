"""A server that goes on from the file of another, as its clients and its driver see it, also when it is killed again and again."""

import json
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch.rendezvous import CannotListen, serving
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.serving.store_record import StoreFile
from tests.unit.rendezvous.busy_client import PATIENCE, SCOPE
from tests.unit.rendezvous.kept_server import KeptServer
from tests.unit.rendezvous.wire import TOKEN, Response, Wire


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def serve(path, loop_kind):
    """serve(): a server with the file, a new one where there is none; the one before it is closed."""
    servers: list[RendezvousServer] = []

    def start(say: Callable[[str], None] = pytest.fail) -> RendezvousServer:
        for server in servers:
            server.close()
        file = StoreFile.open(path) if path.exists() else StoreFile.create(path)
        servers.append(RendezvousServer(TOKEN, file=file, say=say))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        assert not server._faults
        server.close()


def test_a_new_server_has_the_same_values_at_the_same_address(serve):
    first = serve()
    with Client(f"http://127.0.0.1:{first.port}", TOKEN) as client:
        client.put("s", "gone", b"")
        client.put("s", "k", b"v")
        client.append("s", "k", b"w")
        client.add("s", "n", 5)
        since = client.watch("s", timeout=1).version
        client.delete("s", "gone")
        version = client.read("s", "k").version
        assert serve().port == first.port
        assert client.read("s", "k") == (b"vw", version)
        changes = client.watch("s", since=since, timeout=1)
        assert (dict(changes.values), changes.complete) == ({"gone": None}, False)
        assert client.compare_and_set("s", "k", b"new", version)[0]
        assert int(client.read("s", "k").version) > changes.version
        assert client.add("s", "n", 2) == 7


def test_a_request_done_by_the_old_server_is_not_repeated(serve):
    requests = {"add": b"5", "append": b"x", "compare": b"y", "delete": b""}
    answers: list[Response] = []
    again: list[Response] = []
    for found in (answers, again):
        with closing(Wire(serve().port)) as wire:
            for verb, body in requests.items():
                query = f"?id={verb}" + ("&version=0" if verb == "compare" else "")
                found.append(wire.ask("POST", f"/-/{verb}/s/{verb}{query}", body))
            values = [wire.ask("GET", f"/s/{verb}").body for verb in requests]
    assert answers == again
    assert [answer.status for answer in answers] == [200, 200, 200, 404]
    assert values == [b"5", b"x", b"y", b""]


def test_early_values_of_the_driver_are_kept(serve):
    first = serve()
    first.put("s", "k", b"v")
    first.put("s", "j", b"w")
    first.delete("s", "j")
    assert first._loop is None
    second = serve()
    assert (second.keys("s"), second.get("s", "k")) == (["k"], b"v")
    assert second.version > first._store.version


def test_changes_are_on_disk_before_clients_hear_of_them(serve, monkeypatch):
    server = serve()
    heard: list[object] = []
    server.subscribe("s", lambda key, value, _: heard.append((key, value)))
    with closing(Wire(server.port)) as writer, closing(Wire(server.port)) as waiter:
        assert writer.ask("GET", "/s/k").status == 404
        waiter.send(b"GET /-/get/s/k?wait=60 HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode())
        while server.stats().waiting == 0:
            pass
        early: list[object] = []
        append = StoreFile.append

        def watched(file, pieces):
            early.extend(select.select([writer.socket, waiter.socket], [], [], 0.2)[0])
            early.extend(heard)
            append(file, pieces)

        monkeypatch.setattr(StoreFile, "append", watched)
        assert writer.ask("PUT", "/s/k", b"v").status == 200
        assert waiter.read().body == b"v"
    assert not early
    assert heard == [("k", b"v")]


def test_held_answers_keep_the_order_of_requests(serve):
    with closing(Wire(serve().port)) as wire:
        head = b"Authorization: Bearer %s\r\n" % TOKEN.encode()
        put = b"PUT /s/k HTTP/1.1\r\n" + head + b"Content-Length: 1\r\n\r\n%d"
        get = b"GET /s/k HTTP/1.1\r\n" + head + b"\r\n"
        wire.send(b"".join(put % digit + get for digit in range(9)))
        assert [wire.read().body for _ in range(18)] == [
            body for digit in range(9) for body in (b"", b"%d" % digit)
        ]


def test_a_subscriber_gets_missed_changes(serve):
    first = serve()
    heard: list[tuple[str, bytes | None, int]] = []
    first.subscribe("s", lambda *change: heard.append(change))
    for key in ("a", "b", "a"):
        first.put("s", key, b"")
    second = serve()
    again: list[tuple[str, bytes | None, int]] = []
    second.subscribe("s", lambda *change: again.append(change), since=heard[0][2])
    assert again == heard[1:]
    second.delete("s", "b")
    assert again[-1][:2] == ("b", None)


def test_notes_of_the_server_are_restored(serve):
    first = serve()
    first.listen_at("127.0.0.3")
    first.open_to_horovod({"global": 1}, {"127.0.0.1"}, 1)
    first.put("global", "0", b"address")
    first.expect(["127.0.0.3"])
    with closing(Wire(first.port)) as wire:
        wire.ask("GET", "/s/k")
    first.listen_at("127.0.0.4")
    second = serve()
    assert second.was_asked
    with (
        closing(Wire(second.port, "127.0.0.3", source="127.0.0.3")) as wire,
        closing(Wire(second.port, "127.0.0.4")) as other,
    ):
        assert wire.ask("GET", "/global/0", headers=b"").status == 401  # from another address
        assert other.ask("GET", "/global/0").status == 200
    with closing(Wire(second.port)) as wire:
        assert wire.ask("GET", "/global/0", headers=b"").body == b"address"
        second.open_to_horovod({"global": 1}, {"127.0.0.1"}, 1)  # the driver may not know that it is
        assert wire.ask("GET", "/global/0", headers=b"").body == b"address"
        second.open_to_horovod({"global": 1}, {"127.0.0.1"}, 2)
        assert wire.ask("GET", "/global/0", headers=b"").status == 404
    assert "127.0.0.3" in second._traffic.unauthenticated._trusted


def test_a_lost_address_is_reported(serve):
    first = serve()
    first._record.note("at 192.0.2.1")
    first._record.flush()
    said: list[str] = []
    serve(said.append)
    [line] = said
    assert line.startswith(f"warning: the rendezvous can't listen on 192.0.2.1 port {first.port}: ")


def test_a_port_taken_by_another_program_is_an_error(serve, monkeypatch):
    monkeypatch.setattr(serving, "_PATIENCE", 0.1)
    first = serve()
    first.close()
    with (
        socket.create_server(("127.0.0.1", first.port)),
        pytest.raises(CannotListen, match=f"127.0.0.1 port {first.port}: Address already in use"),
    ):
        serve()
    second = serve()
    assert second.port == first.port


def test_the_end_of_the_old_server_is_awaited(serve):
    first = serve()
    first.close()
    other = socket.create_server(("127.0.0.1", first.port))
    timer = threading.Timer(0.3, other.close)
    timer.start()
    assert serve().port == first.port
    timer.join()


ROOT = Path(__file__).parents[3]
CLIENTS = 4
KILLS = 4


@pytest.fixture
def certificate(tmp_path) -> Certificate:
    made = Certificate()
    (tmp_path / "key.pem").write_bytes(made.key + made.pem)
    return made


@pytest.fixture
def server(tmp_path, certificate):
    server = KeptServer(tmp_path / "store", tmp_path / "key.pem")
    yield server
    server.kill()


def kill_under_load(server: KeptServer, client: Client, chance: random.Random) -> None:
    before = client.get(SCOPE, "sum")
    deadline = time.monotonic() + PATIENCE
    while client.get(SCOPE, "sum") == before:
        assert time.monotonic() < deadline, "nobody makes a change"
    time.sleep(chance.uniform(0.0, 0.1))  # any moment will do
    server.kill()
    server.begin()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_acknowledged_change_is_lost_and_none_is_made_twice(server, certificate, tmp_path, scheme):
    url, stop = f"{scheme}://127.0.0.1:{server.port}", tmp_path / "stop"
    argv = [sys.executable, "-m", "tests.unit.rendezvous.busy_client", url, certificate.fingerprint]
    busy = [
        subprocess.Popen([*argv, str(number), str(CLIENTS), str(stop)], stdout=subprocess.PIPE, cwd=ROOT)
        for number in range(CLIENTS)
    ]
    watch = Watch(Client(url, TOKEN, certificate=certificate.fingerprint, lease=PATIENCE))
    with Client(url, TOKEN, certificate=certificate.fingerprint, lease=PATIENCE) as client:
        for seed in range(KILLS):
            kill_under_load(server, client, random.Random(seed))
        stop.touch()
        told = [json.loads(one.communicate(timeout=PATIENCE)[0]) for one in busy]
        watch.end(client)
        turns = told[0]["turns"]
        assert [one["turns"] for one in told] == [turns] * CLIENTS
        total = turns * CLIENTS
        assert sorted(number for one in told for number in one["sums"]) == list(range(1, total + 1))
        written = (client.get(SCOPE, "list") or b"").split()
        assert sorted(written) == sorted(
            b"%d/%d" % (number, turn) for number in range(CLIENTS) for turn in range(turns)
        )
        assert int(client.get(SCOPE, "shared") or b"") == sum(one["swapped"] for one in told)
        for one in told:
            assert one["versions"] == sorted(set(one["versions"]))
        left = client.keys(SCOPE)
    assert dict(watch.values) == dict.fromkeys(left) | watch.values
    assert sorted(watch.values) == left


class Watch:
    """What is in the scope, as one sees it who watches from the start."""

    def __init__(self, client: Client) -> None:
        self.values: dict[str, bytes] = {}
        self._client = client
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self, client: Client) -> None:
        client.put(SCOPE, "end", b"")
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        since = 0
        while "end" not in self.values:
            changes = self._client.watch(SCOPE, since=since, timeout=PATIENCE)
            assert changes.version >= since
            assert not since or not changes.complete, "the server has forgotten what it should know"
            since = changes.version
            self._take(changes.values)

    def _take(self, values: Mapping[str, bytes | None]) -> None:
        for key, value in values.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
