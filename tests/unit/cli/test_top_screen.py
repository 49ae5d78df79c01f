"""The full screen of `hvlaunch top`, without a terminal, and with a feed that this test plays."""

import asyncio
import queue
from types import SimpleNamespace

import pytest
from rich.color import Color
from textual.widgets import DataTable, Static

from hvlaunch.cli.jobs.top_screen import TopScreen, YesNoQuestion
from hvlaunch.view.model import Model, View
from tests.unit.view.scenes import SCENES

COLOURS = {
    tone: Color.parse(name).get_truecolor()
    for tone, name in (("good", "dark_green"), ("wait", "yellow3"), ("bad", "dark_red"))
}


def view(ranks=3, **more):
    workers = [
        {"rank": rank, "host": f"h{rank // 8}", "state": "working", "slot": 0, "start": 0, "round": 0}
        for rank in range(ranks)
    ]
    hosts = [
        {"host": f"h{number}", "state": "ready", "is_listed": True, "is_excluded": False}
        for number in range(-(-ranks // 8))
    ]
    state = {"number": 0, "size": ranks, "state": "running", "elapsed": 1.0, "ended": []}
    job = {"id": "0123456789ab", "command": ["x"], "began": 0.0, "pid": 1, "phase": "running", "round": state}
    return Model().view({**job, **more, "workers": workers, "hosts": hosts}, [], 10.0)


class Feed:
    """Gives the views that the test puts."""

    has_ended = False

    def __init__(self, *views):
        self.views: queue.SimpleQueue[View | None] = queue.SimpleQueue()
        for one in views:
            self.views.put(one)
        self.orders: list[tuple[str, dict[str, object]]] = []
        self.control = SimpleNamespace(post=lambda path, body: self.orders.append((path, body)))
        self.job = SimpleNamespace(id="0123456789ab", label="job 0123456789ab (base)", directory=None)

    def next(self):
        return self.views.get()


def played(feed, play):
    async def run():
        screen = TopScreen(feed)
        async with screen.run_test(size=(120, 30)) as pilot:
            await until(pilot, lambda: screen.screen.query_one("#table", DataTable).row_count)
            await play(screen, pilot)
        feed.views.put(None)

    asyncio.run(run())


async def until(pilot, condition):
    for _ in range(2000):
        if condition():
            return
        await pilot.pause(0.01)
    raise TimeoutError


def test_a_filter_stays_while_news_come():
    feed = Feed(view())

    async def play(screen, pilot):
        table = screen.screen.query_one("#table", DataTable)
        assert table.row_count == 4
        await pilot.press("slash", *"rank", "space", "2")
        await until(pilot, lambda: table.row_count == 1)
        feed.views.put(view())
        await pilot.pause(0.1)
        assert table.row_count == 1
        await pilot.press("escape")
        await until(pilot, lambda: table.row_count == 4)

    played(feed, play)


def test_news_that_come_behind_a_question_are_shown_after_it():
    feed = Feed(view())

    async def play(screen, pilot):
        table = screen.screen.query_one("#table", DataTable)
        await pilot.press("x")
        feed.views.put(view(5))
        await until(pilot, feed.views.empty)
        await pilot.press("n")
        feed.views.put(view(5))
        await until(pilot, lambda: table.row_count == 6)
        assert feed.orders == []

    played(feed, play)


def shown(screen, selector):
    return str(screen.screen.query_one(selector, Static).render())


def test_the_title_names_the_job_and_a_static_job_has_no_round():
    feed = Feed(view(name="base", is_elastic=False))

    async def play(screen, pilot):
        await until(pilot, lambda: shown(screen, "#head"))
        assert shown(screen, "#head") == "job 0123456789ab (base): running, 3 of 3 workers on 1 host, 10.0 s"
        assert not screen.screen.query_one("#rounds").display
        feed.views.put(view(is_elastic=True))
        await until(pilot, lambda: "round" in shown(screen, "#head"))
        assert "running, round 0 running, 3 of 3 workers" in shown(screen, "#head")
        assert screen.screen.query_one("#rounds").display

    played(feed, play)


@pytest.mark.parametrize(
    "scene", {scene.tone: scene for scene in SCENES.values()}.values(), ids=lambda scene: scene.tone
)
def test_the_verdict_stands_above_all_and_its_colour_is_its_tone(scene):
    feed = Feed(scene.view())

    async def play(screen, pilot):
        await until(pilot, lambda: shown(screen, "#verdict"))
        assert shown(screen, "#verdict").strip().split("   ") == [
            part for part in (scene.verdict, scene.detail) if part
        ]
        assert screen.screen.query_one("#verdict").region.y == 0
        line = screen.screen.query_one("#verdict", Static).render_line(0)
        first = next(segment for segment in line if segment.text.startswith(f" {scene.verdict[:20]}"))
        assert first.style.bgcolor.get_truecolor() == COLOURS[scene.tone]

    played(feed, play)


def test_the_question_of_x_names_the_job():
    feed = Feed(view())

    async def play(screen, pilot):
        await pilot.press("x")
        await until(pilot, lambda: isinstance(screen.screen, YesNoQuestion))
        assert shown(screen, "Static").splitlines()[0] == "Stop job 0123456789ab (base)?"
        for key in ("q", "enter", "escape"):
            await pilot.press(key, "x")
        await pilot.press("n")
        assert feed.orders == []

    played(feed, play)


def test_orders():
    feed = Feed(view())

    async def play(screen, pilot):
        await pilot.press("k")
        await pilot.press("enter")
        await until(pilot, lambda: feed.orders)
        await pilot.press("x")
        await pilot.press("y")
        await until(pilot, lambda: len(feed.orders) == 2)

    played(feed, play)
    assert feed.orders == [("/signal", {"signal": "USR1"}), ("/stop", {"kill": False})]


def test_a_thousand_ranks_are_folded_and_unfolded():
    feed = Feed(view(1000))

    async def play(screen, pilot):
        table = screen.screen.query_one("#table", DataTable)
        assert table.row_count == 125 + 5
        await pilot.press("f")
        await until(pilot, lambda: table.row_count == 1125)

    played(feed, play)
