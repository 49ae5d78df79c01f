"""The limit of connections to one address, with a clock, a sleep and a die of our own."""

import threading

import pytest

from hvlaunch.errors import ConnectFailed, SentAway, StartTimeout
from hvlaunch.ssh.streams import ConnectLimit
from tests.testhosts.places import wait_until

from .conftest import in_thread


class Times:
    """A clock that only sleeping moves, and what was slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def times():
    return Times()


@pytest.fixture
def connect_limit(times):
    return ConnectLimit(2, random=lambda: 1.0, clock=times.clock, sleep=times.sleep)


def failing(times: int, error: Exception):
    """An attempt that fails so many times."""
    made: list[None] = []

    def attempt() -> int:
        made.append(None)
        if len(made) <= times:
            raise error
        return len(made)

    return attempt


AWAY = SentAway("closed at once", host="a", hint="wait")


def test_an_accepted_attempt_does_not_wait(connect_limit, times):
    assert connect_limit.run("a", failing(0, AWAY), host="a", deadline=200.0) == 1
    assert times.slept == []


def test_pauses_double_up_to_two_seconds(connect_limit, times):
    assert connect_limit.run("a", failing(9, AWAY), host="a", deadline=200.0) == 10
    assert times.slept == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0])


def test_each_pause_is_cut_at_random(times):
    dice = iter([0.5, 0.0, 0.25])
    connect_limit = ConnectLimit(2, random=lambda: next(dice), clock=times.clock, sleep=times.sleep)
    assert connect_limit.run("a", failing(3, AWAY), host="a", deadline=200.0) == 4
    assert times.slept == pytest.approx([0.1, 0.0, 0.2])


def test_ten_times_are_enough(connect_limit, times):
    with pytest.raises(SentAway):
        connect_limit.run("a", failing(10, AWAY), host="a", deadline=200.0)
    assert len(times.slept) == 9


def test_no_attempt_waits_beyond_the_deadline(connect_limit, times):
    with pytest.raises(SentAway):
        connect_limit.run("a", failing(10, AWAY), host="a", deadline=101.0)
    assert times.now < 101.0


def test_other_failures_are_final(connect_limit, times):
    with pytest.raises(ConnectFailed):
        connect_limit.run("a", failing(1, ConnectFailed("refused", host="a")), host="a", deadline=200.0)
    assert times.slept == []


def test_no_more_than_the_limit_at_one_address():
    connect_limit = ConnectLimit(2)
    inside: list[None] = []
    most: list[int] = []
    go = threading.Event()

    def attempt() -> None:
        inside.append(None)
        most.append(len(inside))
        go.wait(10.0)
        inside.pop()

    threads = [
        in_thread(lambda: connect_limit.run("a", attempt, host="a", deadline=1e9))[0] for _ in range(6)
    ]
    other, _ = in_thread(lambda: connect_limit.run("b", attempt, host="b", deadline=1e9))
    wait_until(lambda: len(inside) == 3, "two at one address, and one at another")
    go.set()
    for thread in (*threads, other):
        thread.join()
    assert len(most) == 7
    assert max(most) == 3


def test_waiting_for_other_attempts_until_the_deadline():
    connect_limit, inside, go = ConnectLimit(1), threading.Event(), threading.Event()

    def attempt() -> None:
        inside.set()
        go.wait(10.0)

    thread, _ = in_thread(lambda: connect_limit.run("a", attempt, host="x", deadline=1e9))
    inside.wait(10.0)
    with pytest.raises(
        StartTimeout, match="too many other connections to a were being made at the same time"
    ) as caught:
        connect_limit.run("a", failing(0, AWAY), host="late", deadline=0.0)
    go.set()
    thread.join()
    assert caught.value.host == "late"
    assert "--connect-limit" in (caught.value.hint or "")


def test_a_failure_makes_room_for_the_next(connect_limit):
    for _ in range(5):
        with pytest.raises(ConnectFailed):
            connect_limit.run("a", failing(1, ConnectFailed("refused", host="a")), host="a", deadline=200.0)
    assert connect_limit.run("a", failing(0, AWAY), host="a", deadline=200.0) == 1


def test_a_pausing_attempt_makes_room(times):
    connect_limit = ConnectLimit(1, random=lambda: 1.0, clock=times.clock)
    taken = []
    connect_limit._sleep = lambda _: taken.append(
        connect_limit.run("a", failing(0, AWAY), host="other", deadline=times.now)
    )
    assert connect_limit.run("a", failing(1, AWAY), host="a", deadline=200.0) == 2
    assert taken == [1]
