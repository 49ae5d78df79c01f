"""The page of hvlaunch top --web in a browser, in each state of a job. With a real server, and a feed that plays scenes."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from hvlaunch.cli.jobs.feed import JobFeed
from hvlaunch.cli.jobs.web import Access, JobPage, WebAnswer, WebRequest, WebServer
from hvlaunch.console.output_store import OutputStore, head_of
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside import KnownJob
from hvlaunch.view.model import View
from tests.browser import LIMIT, Browser, needs_chromium
from tests.testhosts.hosts import wait_until
from tests.unit.view.scenes import JOB, SCENES, Scene

pytestmark = [pytest.mark.timeout(300), pytest.mark.no_cover, needs_chromium]
LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]


class PlayedFeed(JobFeed):
    """The view of a job whose driver says what a scene has."""

    control: Any

    def __init__(self, directory: Path) -> None:
        self.job = KnownJob(JOB, directory, {}, None, has_driver=True)
        self.control = self
        self.scene: Scene = SCENES["training"]

    def next(self) -> View | None:
        return self.scene.view()

    def get(self, path: str, wait: float = 0.0) -> Any:
        return self.scene.report

    def post(self, path: str, body: Any, wait: float = 0.0) -> Any:
        return {"threads": [], "stacks": []}


class Page:
    """The page of a played job, in a browser."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.feed = PlayedFeed(directory)
        self.store = OutputStore(directory, head_of(ConsoleOptions()))
        self.print(*(f"step {step} of <b>rank {step % 8}</b>" for step in range(100)))
        server = WebServer(None)
        self._access = Access(JOB, server.address, server.port)
        self._page = JobPage(self.feed, self._access)
        self._serving = ExitStack()
        self._serving.enter_context(server.serving(self._respond))
        stack.callback(self._serving.close)
        self.browser = Browser(directory / "profile")
        stack.callback(self.browser.web.quit)
        self.browser.web.get(f"{server.url}/#{self._access.new_token()}")

    def _respond(self, request: WebRequest) -> WebAnswer:
        return self._page.respond(request)

    def print(self, *lines: str) -> None:
        for number, line in enumerate(lines):
            self.store.output(number % 8, "stdout", f"{line}\n".encode())
        self.store.write()

    def play(self, name: str) -> None:
        """Show the scene, in a page that is loaded anew: a page of a job that has ended asks no more."""
        self.feed.scene = SCENES[name]
        self._page = JobPage(self.feed, self._access)
        self.browser.web.refresh()
        self.browser.shows("#verdict-text", SCENES[name].verdict)
        self.browser.shows("#details-head", "All ranks")

    def press(self, key: str, *, focus: str | None = None) -> None:
        """Press a key, where the element with the data-key `focus` has the focus."""
        if focus is not None:
            self.browser.web.execute_script(
                "document.querySelector(`[data-key='${arguments[0]}']`).focus()", focus
            )
        ActionChains(self.browser.web).send_keys(key).perform()

    def leave(self) -> None:
        """End hvlaunch top."""
        self._serving.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with ExitStack() as stack:
        page = Page(tmp_path_factory.mktemp("job"), stack)
        page.browser.shows("#summary", "<b>digits</b>")
        yield page


TONES = {
    "good": "rgb(20, 113, 61)",
    "wait": "rgb(255, 197, 61)",
    "bad": "rgb(179, 38, 30)",
    "lost": "rgb(61, 70, 83)",
}
BAND = """\
const band = document.getElementById("verdict"), text = document.getElementById("verdict-text");
return [getComputedStyle(band).backgroundColor, band.getBoundingClientRect().top, parseFloat(getComputedStyle(text).fontSize)];
"""


def test_the_verdict_is_the_first_and_largest_thing_in_its_colour(page: Page) -> None:
    for name, scene in SCENES.items():
        page.play(name)
        assert page.browser.text("#verdict-detail") == scene.detail
        page.browser.show_as(width=1280)
        color, top, size = page.browser.web.execute_script(BAND)
        assert (color, top) == (TONES[scene.tone], 0), name
        assert size >= 40, "two metres away"
        assert page.browser.web.title == scene.verdict


@pytest.mark.parametrize("name", ["training", "hung", "smaller", "away", "connecting", "failed"])
def test_the_layout_is_sound(page: Page, name: str) -> None:
    page.play(name)
    page.browser.web.find_element("css selector", "#use summary").click()
    page.browser.shows("#moments", "ready" if name == "connecting" else "round 0 begins")
    faults = {}
    for width, scheme in LOOKS:
        page.browser.show_as(width=width, scheme=scheme)
        faults[width, scheme] = page.browser.layout_faults()
    assert faults == {look: [] for look in LOOKS}
    assert page.browser.nameless() == []


SPOILED = """\
const add = (style, text) => document.body.append(Object.assign(document.createElement("p"), { textContent: text, style }));
add("position: fixed; bottom: 0; left: 0; color: #999; background: #fff", "pale words");  // seen, however long the page grows
add("width: 3000px", "wide words");
add("position: absolute; top: 0; left: 0; width: 100%; height: 12rem; background: #fff", "a cover");
"""


def test_faults_of_a_layout_are_noticed(page: Page) -> None:
    page.play("training")
    page.browser.web.execute_script(SPOILED)
    page.browser.show_as(width=1280)
    faults = "\n".join(page.browser.layout_faults())
    assert "scrolls sideways: 3000 of 1280 px" in faults
    assert '"pale words" has a contrast of 2.85' in faults
    assert '"Training: 32 of 32 ranks" is covered by p' in faults


CELLS = "return [...document.querySelectorAll('.tile i')].map((cell) => [cell.title, cell.className]);"


def test_the_map_shows_which_ranks_and_hosts_are_wrong(page: Page) -> None:
    page.play("hung")
    cells = dict(page.browser.web.execute_script(CELLS))
    assert len(cells) == 32
    assert {title for title, tone in cells.items() if tone == "bad"} == {"rank 3: hanging", "rank 7: hanging"}
    heats = [cells[f"rank {rank}: working"] for rank in (8, 9, 10, 11)]
    assert heats == ["heat-0", "heat-1", "heat-2", "heat-3"], "from idle to busy"
    page.play("smaller")
    assert page.browser.text(".tile.bad").split("\n")[0] == "gpu2"
    assert "lost: silent for 15 s" in page.browser.text(".tile.bad")


WORST = "const cell = document.querySelector('#map i.bad'); return [cell.title, cell.getBoundingClientRect().top];"


def test_of_a_thousand_ranks_the_hung_one_is_on_the_first_screen(page: Page) -> None:
    page.play("many")
    page.browser.show_as(width=1280)
    assert page.browser.text("#map .tile").split("\n")[0] == "gpu124"
    title, top = page.browser.web.execute_script(WORST)
    assert (title, top < 600) == ("rank 999: hanging", True)
    assert page.browser.layout_faults() == []


FOCUSED = "return document.activeElement.dataset.key ?? document.activeElement.id"


def test_a_host_and_a_rank_are_chosen_by_keyboard(page: Page) -> None:
    """The details are theirs, and the focus stays while the page is drawn anew."""
    page.play("training")
    page.press(Keys.ENTER, focus="gpu2")
    page.browser.shows("#details-head", "Host gpu2")
    assert page.browser.web.execute_script(FOCUSED) == "gpu2"
    assert "gpu1" not in page.browser.text("#table")
    page.press(Keys.ENTER, focus="9")
    page.browser.shows("#details-head", "Rank 9 on host gpu2")
    assert page.browser.web.execute_script(FOCUSED) == "9"
    page.browser.click("#show-all")
    page.browser.shows("#details-head", "All ranks")
    page.press("/")
    assert page.browser.web.execute_script(FOCUSED) == "filter"


CELL = """\
const cell = document.querySelector(".tile i[title^='rank 2:']");
cell.scrollIntoView();
const { x, y } = cell.getBoundingClientRect();
return { x: Math.round(x + 5), y: Math.round(y + 5) };
"""


def test_a_rank_of_the_map_is_chosen_by_a_slow_click(page: Page) -> None:
    """The map is drawn anew each second, and a click is a press and a release of one element."""
    page.play("training")
    page.browser.shows("#lines", "<b>rank 1</b>")
    box = page.browser.web.execute_script(CELL)
    mouse = ActionChains(page.browser.web).w3c_actions
    mouse.pointer_action.move_to_location(box["x"], box["y"]).pointer_down()
    # Several views come before the release.
    mouse.pointer_action.pause(3).pointer_up()
    mouse.perform()
    page.browser.shows("#details-head", "Rank 2 on host gpu1")
    lines = wait_until(
        lambda: text if "[1]" not in (text := page.browser.text("#lines")) else None, "one rank", LIMIT
    )
    assert {line.split("]")[0] for line in lines.splitlines()} == {"[2"}


LAST = "const box = document.getElementById('lines'); return box.scrollTop + box.clientHeight >= box.scrollHeight - 8"


def test_the_output_is_followed_until_the_reader_scrolls_up(page: Page) -> None:
    page.play("training")
    page.browser.shows("#lines", "step 99")
    page.print("a later line")
    page.browser.shows("#lines", "a later line")
    assert page.browser.web.execute_script(LAST)
    page.browser.web.execute_script("document.getElementById('lines').scrollTop = 0")
    page.print("a line that nobody sees")
    wait_until(
        lambda: page.browser.web.find_element("css selector", "#follow").is_displayed() or None,
        "a button",
        LIMIT,
    )
    assert "nobody sees" not in page.browser.text("#lines")
    page.browser.click("#follow")
    page.browser.shows("#lines", "nobody sees")
    assert page.browser.web.execute_script(LAST)


def test_a_lost_connection_is_the_verdict(tmp_path: Path) -> None:
    """A job is not shown as if it were fine when `hvlaunch top` has ended."""
    with ExitStack() as stack:
        page = Page(tmp_path, stack)
        page.play("training")
        page.leave()
        page.browser.shows("#verdict-text", "Connection lost: no news for ")
        assert "hvlaunch does not answer; the page shows the job at " in page.browser.text("#verdict-detail")
        assert page.browser.web.execute_script(BAND)[0] == TONES["lost"]
        assert page.browser.web.find_element("css selector", "#main").get_attribute("class") == "stale"
        page.browser.show_as(width=390)
        assert page.browser.layout_faults() == []


def test_a_driver_that_is_silent_is_the_verdict_until_it_answers(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.play("training")
    answers = threading.Event()
    monkeypatch.setattr(page.feed, "next", lambda: answers.wait(LIMIT) and page.feed.scene.view())
    page.browser.shows("#verdict-text", "Connection lost: no news for ")
    assert "the driver does not answer" in page.browser.text("#verdict-detail")
    answers.set()
    page.browser.shows("#verdict-text", "Training: 32 of 32 ranks")


def test_text_of_a_job_makes_no_elements(page: Page) -> None:
    for name in ("training", "hung", "smaller", "failed"):
        page.play(name)
        assert (
            page.browser.web.find_elements("css selector", "main b:not(.tile > b), script:not([src])") == []
        )
    assert "<b>shard-9</b>" in page.browser.text("#report")
