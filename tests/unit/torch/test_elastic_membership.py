"""A worker's talk with the driver about its rounds, over a real rendezvous."""

import threading

import pytest

from hvlaunch.rendezvous import Client
from hvlaunch.rendezvous.client_errors import RendezvousUnreachable
from hvlaunch.rendezvous.round_messages import BEATS, ROUNDS, Beat, Notice, decode, encode
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


def test_the_driver_hears_of_the_meeting_at_once_and_of_the_end(server, membership):
    beats = []
    has_met = threading.Event()

    def hear(_key, value):
        beats.append(decode(Beat, value))
        if beats[-1].round == 4:
            has_met.set()

    server.subscribe(BEATS, hear)
    membership.start()
    membership.last_round = 4
    membership.met()
    assert has_met.wait(LONG)
    membership.finish(is_done=True)
    assert beats[-1] == Beat(-1, last=True, round=4, done=True)


def test_a_sign_of_life_that_did_not_get_through_is_sent_again_soon(server, membership, monkeypatch):
    heard = threading.Event()
    put, failures = Client.put, [RendezvousUnreachable("no answer", url="http://127.0.0.1")]

    def fails_once(self, *args):
        if failures:
            raise failures.pop()
        put(self, *args)

    monkeypatch.setattr(Client, "put", fails_once)
    server.subscribe(BEATS, lambda _key, _value: heard.set())
    membership.start()
    assert heard.wait(LONG / 2)
