"""A server that is killed again and again under load, and what its clients notice: nothing but the time."""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.serving.certificate import Certificate
from tests.unit.rendezvous.busy_client import PATIENCE, SCOPE
from tests.unit.rendezvous.kept_server import KeptServer
from tests.unit.rendezvous.wire import TOKEN

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
