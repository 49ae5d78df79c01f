"""The feed, with a driver that this test plays."""

from hvlaunch.console.stored import Stored
from hvlaunch.view.feed import Feed

STAMP = "1970-01-01T00:00:01.000Z"


class Driver:
    """Answers as the control socket does."""

    def __init__(self) -> None:
        self.pid = 1
        self.events: list[dict[str, object]] = []
        self.samples: dict[str, object] | None = None
        self.asked: list[str] = []

    def ask(self, path):
        self.asked.append(path)
        if path == "/job":
            about = {"id": "0123456789ab", "name": None, "command": ["x"], "began": 0.0, "pid": self.pid}
            return {**about, "phase": "running", "round": None, "workers": [], "hosts": []}
        if path == "/samples":
            return self.samples
        number = int(path.partition("since=")[2].partition("&")[0])
        return {"next": max(number, len(self.events)), "missed": 0, "events": self.events[number:]}


def ready(name):
    return {"type": "host_ready", "time": STAMP, "host": name}


def texts(view):
    return [moment.text for moment in view.moments]


def feed_of(driver):
    return Feed(driver.ask, list, lambda: 10.0)


def test_events_are_asked_for_once():
    driver = Driver()
    feed = feed_of(driver)
    driver.events = [ready("a")]
    feed.current_view()
    driver.events.append(ready("b"))
    assert texts(feed.current_view()) == ["a is ready", "b is ready"]
    feed.await_news(3)
    assert driver.asked[-1] == "/events?since=2&wait=3"


def test_new_driver_is_asked_for_all_events():
    driver = Driver()
    feed = feed_of(driver)
    driver.events = [ready("a"), ready("b"), ready("c")]
    feed.current_view()
    driver.pid, driver.events = 2, [ready("a"), ready("b")]
    assert texts(feed.current_view()) == ["a is ready", "b is ready"]


def test_ended_job_is_not_asked_for_its_state():
    driver = Driver()
    items = [Stored(1.0, "stdout", b"last words\n", 3)]
    feed = Feed(driver.ask, lambda: [items.pop()] if items else [], lambda: 10.0)
    feed.current_view()
    driver.events = [{"type": "job_ended", "time": STAMP, "exit_code": 1, "rank": 3}]
    driver.asked.clear()
    view = feed.current_view()
    assert feed.has_ended
    assert "/job" not in driver.asked
    assert view.ending is not None
    assert view.ending.lines == ("last words",)


def test_driver_without_samples_has_a_view():
    assert not feed_of(Driver()).current_view().is_sampled
