"""The records that can be asked for while a job runs."""

import json
import threading

import pytest

from hvlaunch.driver.history import History
from hvlaunch.engine import events as on


class Made:
    """A recorder that makes one record of each event, and counts how many there were."""

    def __init__(self):
        self.made = 0

    def __call__(self, write, wall):
        def see(event, actions, now):
            self.made += 1
            write({"host": event.host, "at": wall()})

        return see


@pytest.fixture
def made():
    return Made()


@pytest.fixture
def history(made):
    times = iter(range(10_000))
    return History(made, kept=5, wall=lambda: float(next(times)))


def see(history, *hosts):
    for host in hosts:
        history.watch(on.HostConnected(host), [], 0.0)


def hosts(page):
    return [json.loads(record)["host"] for record in page.records]


def test_records_are_made_on_request_only(history, made):
    see(history, "a", "b")
    assert made.made == 0
    assert hosts(history.since(0)) == ["a", "b"]
    assert made.made == 2


def test_records_have_the_time_at_which_it_happened(history):
    see(history, "a", "b")
    assert [json.loads(record)["at"] for record in history.since(0).records] == [0.0, 1.0]


def test_pages_go_on_where_the_last_one_ended(history):
    see(history, "a", "b")
    page = history.since(0)
    assert (page.next, page.missed) == (2, 0)
    assert history.since(2) == ((), 2, 0)
    see(history, "c")
    assert hosts(history.since(2)) == ["c"]


def test_oldest_records_are_dropped_and_counted_as_missed(history):
    see(history, *"abcdefg")
    page = history.since(1)
    assert (hosts(page), page.next, page.missed) == (list("cdefg"), 7, 1)


def test_unread_events_are_bounded(history, made):
    see(history, *map(str, range(2_500)))
    assert made.made >= 1_000


def test_waiting_client_is_called_once(history):
    calls = []
    see(history, "a")
    history.when_longer(1, lambda: calls.append("waited"))
    assert calls == []
    see(history, "b", "c")
    assert calls == ["waited"]


def test_wait_for_an_existing_record_is_answered_at_once(history):
    calls = []
    see(history, "a")
    history.when_longer(0, lambda: calls.append("there"))
    assert calls == ["there"]


def test_cancelled_wait_is_not_called(history):
    calls = []
    history.when_longer(0, lambda: calls.append("waited"))()
    see(history, "a")
    assert calls == []


def test_following_client_gets_the_last_records(made):
    history = History(made)
    see(history, "a")
    page = history.since(0)
    see(history, "b")
    read: list[str] = []
    follower = threading.Timer(0.05, lambda: read.extend(hosts(history.since(page.next))))
    follower.start()
    history.close()
    assert made.made == 2
    follower.join()
    assert read == ["b"]


def test_end_does_not_wait_without_a_recent_client(made):
    now = [0.0]
    history = History(made, clock=lambda: now[0])
    see(history, "a")
    history.close()
    history.since(0)
    now[0] = 5.0
    see(history, "b")
    history.close()
    assert made.made == 1
