"""A worker's talk with the driver about its rounds, over a real rendezvous."""

import threading

import pytest

from hvlaunch.rendezvous import Client, RendezvousUnreachable
from hvlaunch.rendezvous.client import WrongCertificate
from hvlaunch.rendezvous.messages import (
    ASKS,
    BEATS,
    PLACES,
    ROUNDS,
    Ask,
    Beat,
    Grant,
    Notice,
    decode,
    encode,
)
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.rendezvous.worker import Membership

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

    def hear(_key, value, _version):
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


def test_a_beat_that_is_under_way_does_not_come_after_the_last_one(server, membership, monkeypatch):
    beats, is_under_way, has_finished = [], threading.Event(), threading.Event()
    put = Client.put

    def slow_put(self, scope, key, value):
        if not decode(Beat, value).last:
            is_under_way.set()
            has_finished.wait(0.5)
        put(self, scope, key, value)

    monkeypatch.setattr(Client, "put", slow_put)
    server.subscribe(BEATS, lambda _key, value, _version: beats.append(decode(Beat, value).last))
    membership.start()
    assert is_under_way.wait(LONG)
    membership.finish(is_done=True)
    has_finished.set()
    for thread in threading.enumerate():
        if thread.name == "hvlaunch _send_beats":
            thread.join(LONG)
    assert beats == [False, True]


def fail_once(monkeypatch, name, cause=None):
    """The next call of this method of a client finds no way to the driver; the list is empty then."""
    right, failures = getattr(Client, name), [RendezvousUnreachable("no answer", url="http://127.0.0.1")]
    failures[0].__cause__ = cause

    def fails_once(self, *args, **options):
        if failures:
            raise failures.pop()
        return right(self, *args, **options)

    monkeypatch.setattr(Client, name, fails_once)
    return failures


def test_a_sign_of_life_that_did_not_get_through_is_sent_again_soon(server, membership, monkeypatch):
    heard = threading.Event()
    fail_once(monkeypatch, "put")
    server.subscribe(BEATS, lambda _key, _value, _version: heard.set())
    membership.start()
    assert heard.wait(LONG / 2)


def test_a_cut_costs_no_worker_that_asks_or_waits_for_its_place(server, membership, monkeypatch):
    """Its commits are in its memory."""
    asks = []
    server.subscribe(ASKS, lambda _key, value, _version: asks.append(decode(Ask, value)))
    failures = fail_once(monkeypatch, "put"), fail_once(monkeypatch, "watch")
    server.put(PLACES, "a/0/0", encode(Grant(4, 0, 1)))
    membership.ask(3, "a peer is gone")
    assert membership.grant().round == 4
    assert asks == [Ask(-1, 3, "a peer is gone")]
    assert failures == ([], [])


def test_a_foreign_server_ends_the_worker(membership, monkeypatch):
    fail_once(monkeypatch, "put", WrongCertificate("its certificate is not the expected one"))
    with pytest.raises(RendezvousUnreachable):
        membership.ask(3, None)
