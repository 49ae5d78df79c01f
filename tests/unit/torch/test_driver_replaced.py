"""A worker's view of a killed driver and its successor."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import ASKS, BEATS, PLACES, ROUNDS, Ask, Grant, Notice, decode, encode
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.worker import Membership
from hvlaunch.torch.http_store import HTTPStore
from tests.unit.rendezvous.kept_server import KeptServer
from tests.unit.rendezvous.wire import TOKEN

LONG = 60.0
WORKER = "a/0/0"


@pytest.fixture
def server(tmp_path):
    made = Certificate()
    (tmp_path / "key.pem").write_bytes(made.key + made.pem)
    server = KeptServer(tmp_path / "store", tmp_path / "key.pem")
    yield server
    server.kill()


@pytest.fixture
def driver(server):
    """Writes and reads what the driver does."""
    with Client(f"http://127.0.0.1:{server.port}", TOKEN, lease=LONG) as client:
        yield client


@pytest.fixture
def membership(server):
    with Client(f"http://127.0.0.1:{server.port}", TOKEN, lease=LONG) as client:
        membership = Membership(client, WORKER, beat=0.05)
        yield membership
        membership.finish()


def replace(server: KeptServer, seconds: float = 0.2) -> None:
    """The next one is there after so many seconds."""
    server.kill()
    threading.Timer(seconds, server.begin).start()


def test_a_worker_beats_on_and_hears_of_its_round(server, driver, membership):
    broken = threading.Event()
    membership.enter(3, broken.set)
    membership.start()
    beats = driver.watch(BEATS, timeout=LONG)
    driver.put(ROUNDS, "3", encode(Notice("changing", "1 more worker")))
    while not membership.is_changing:
        pass
    replace(server)
    again = driver.watch(BEATS, since=beats.version, timeout=LONG)
    assert again.version > beats.version
    assert WORKER in again.values
    assert membership.is_changing
    driver.put(ROUNDS, "3", encode(Notice("broken", "host b is lost")))
    assert broken.wait(LONG)


def test_a_worker_that_asked_is_given_its_place_by_the_next_driver(server, driver, membership):
    membership.ask(7, "host b is lost")
    replace(server)
    with ThreadPoolExecutor(1) as pool:
        granted = pool.submit(membership.grant)
        [asked] = driver.watch(ASKS, timeout=LONG).values.values()
        assert asked is not None
        assert decode(Ask, asked) == Ask(-1, 7, "host b is lost")
        driver.put(PLACES, WORKER, encode(Grant(4, rank=1, size=2)))
        assert granted.result(LONG) == Grant(4, rank=1, size=2)


def test_a_worker_asks_while_there_is_no_driver(server, driver, membership):
    replace(server)
    membership.ask(7, None)
    assert list(driver.watch(ASKS, timeout=LONG).values) == [WORKER]


def test_a_store_of_torch_s_goes_on(server, monkeypatch):
    monkeypatch.setenv("HVLAUNCH_RENDEZVOUS", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("HVLAUNCH_TOKEN", TOKEN)
    monkeypatch.setenv("HVLAUNCH_LEASE", f"{LONG}")
    store = HTTPStore(timeout=timedelta(seconds=LONG))
    store.set("k", "v")
    store.queue_push("q", "first")
    assert store.add("n", 2) == 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "later")
        replace(server)
        assert store.add("n", 3) == 5
        assert store.queue_pop("q") == b"first"
        assert (store.get("k"), store.num_keys()) == (b"v", 2)
        store.set("later", "w")
        assert waiting.result(LONG) == b"w"
    store.close()
