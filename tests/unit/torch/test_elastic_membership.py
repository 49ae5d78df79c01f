"""A worker's talk with the driver about its rounds, over a real rendezvous."""

import threading

import pytest

from hvlaunch.rendezvous import Client
from hvlaunch.rendezvous.round_messages import ROUNDS, Notice, encode
from hvlaunch.rendezvous.serving.server import RendezvousServer
from hvlaunch.torch.elastic.membership import Membership

LONG = 30.0


@pytest.fixture
def server():
    with RendezvousServer("t0ken", host="127.0.0.1") as server:
        yield server


@pytest.fixture
def membership(server):
    with Client(f"http://127.0.0.1:{server.port}", "t0ken") as client:
        membership = Membership(client, "a/0/0", beat=LONG)
        yield membership
        membership.finish()


MALFORMED = [
    ("2", b"\xff"),
    ("2", b"{}"),
    ("2", b"[" * 100_000),
    ("2", b'{"state": 1, "cause": ""}'),
    ("two", encode(Notice("broken", "of no round"))),
]


@pytest.mark.parametrize(("key", "value"), MALFORMED)
def test_a_malformed_value_ends_no_watch(server, membership, key, value):
    broken = threading.Event()
    server.put(ROUNDS, key, value)
    server.put(ROUNDS, "3", encode(Notice("changing", "1 more worker")))
    membership.enter(3, broken.set)
    membership.start()
    server.put(ROUNDS, "3", encode(Notice("broken", "host b is lost")))
    assert broken.wait(LONG)
    assert membership.is_changing
    assert membership.broken(2, 0.0) is None
    assert membership.broken(3, 0.0) == Notice("broken", "host b is lost")
