"""The watch for a slow host, with samples and a clock of the test."""

from collections.abc import Callable
from typing import Any

import pytest

from hvlaunch.driver.observing import Observe
from hvlaunch.driver.observing.slow_watch import SlowWatch
from hvlaunch.engine import events as on
from hvlaunch.job import ElasticOptions
from tests.unit.gloo.history import spec
from tests.unit.telemetry.test_slow import course, hosts


class Site:
    """Plays the driver's loop, the agenda and the observation: each look gets the next round of samples."""

    def __init__(self, evict_slow: float | None, by: str = "limit") -> None:
        machines = hosts(3)
        machines[1].by, machines[1].slow = by, 1.6 if by else 1.0
        self.rounds = course(machines, 1, rounds=60)
        self.looks = 0
        self.now = 0.0
        self.events: list[on.HostJudged] = []
        self.calls: list[tuple[float, Callable[[], None]]] = []
        elastic = None if evict_slow is None else ElasticOptions(min_np=1, evict_slow=evict_slow)
        links: list[Any] = [type("Link", (), {"pids": {(0, 0): 1}}) for _ in range(3)]
        self.watch = SlowWatch(
            spec("a:1,b:1,c:1", elastic=elastic),
            links,
            self.post,
            lambda at, call: self.calls.append((at, call)),
            self.clock,
        )

    def clock(self) -> float:
        return self.now

    def post(self, item: Any) -> None:
        if isinstance(item, Observe):
            item.answer(self)  # type: ignore[arg-type]
        else:
            self.events.append(item)

    def keep_on(self, _seconds: float) -> None:
        self.looks += 1

    def when_fresh(self, _within: float, call: Callable[[], None]) -> None:
        call()

    def newest(self) -> list[Any]:
        samples = self.rounds[self.looks].values()
        self.now = max(self.now, *(sample.time for sample in samples))
        return list(samples)

    def run(self, looks: int) -> None:
        self.watch.watch(on.WorkerStarted("a", 0, 0, 1), (), self.now)
        while self.looks < looks:
            at, call = self.calls.pop(0)
            self.now = max(self.now, at)
            call()


@pytest.mark.parametrize(("evict_slow", "delay"), [(None, 60.0), (1.5, 5.0)])
def test_the_first_look_comes_late_unless_slow_hosts_are_replaced(
    evict_slow: float | None, delay: float
) -> None:
    site = Site(evict_slow)
    site.watch.watch(on.WorkerStarted("a", 0, 0, 1), (), 7.0)
    site.watch.watch(on.WorkerStarted("b", 0, 0, 1), (), 9.0)
    assert [at for at, _ in site.calls] == [7.0 + delay]


def test_a_slow_host_is_reported_once_and_its_end_too() -> None:
    site = Site(1.5)
    site.run(30)
    (judged,) = site.events
    assert (judged.host, judged.reason) == ("h1", "cpu")
    # From now on it is as fast as the others.
    site.rounds[site.looks + 1 :] = course(hosts(3), 2, rounds=60)[site.looks + 1 :]
    site.run(45)
    assert site.events[1:] == [on.HostJudged("h1")]


def test_a_healthy_job_has_no_verdict_and_a_job_that_is_over_no_look() -> None:
    site = Site(1.5, by="")
    site.run(20)
    assert not site.events
    site.watch.stop()
    site.calls.pop(0)[1]()
    assert not site.calls
