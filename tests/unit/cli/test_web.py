"""The page's server, by its requests: who is let in, and what is passed on. With a real server, and a feed that this test plays."""

import json
import socket
import ssl
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.cli.jobs import metrics, web
from hvlaunch.cli.jobs.feed import JobFeed
from hvlaunch.cli.jobs.web import Access, JobPage, WebServer
from hvlaunch.console.output_store import OutputStore, head_of
from hvlaunch.errors import BadUsage
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside import KnownJob
from hvlaunch.outside.control import ControlRefused, DriverGone
from hvlaunch.view.model import Model, View

JOB = "0123456789ab"
STATE = {"id": JOB, "name": None, "command": ["x"], "began": 1.0, "pid": 1, "phase": "running", "round": None}
ENDED = {
    "type": "job_ended",
    "time": "2026-01-01T00:00:02Z",
    "elapsed": 1.0,
    "exit_code": 7,
    "cause": "it failed",
    "hint": None,
}


class PlayedControl:
    """What the job's driver answers."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {
            "/stacks": {"threads": [], "stacks": []},
            "/signal": {},
            "/report?wait=5": {"outcome": "failed"},
        }

    def get(self, path: str, wait: float = 0.0) -> Any:
        return self.post(path, None, wait)

    def post(self, path: str, body: Any, wait: float = 0.0) -> Any:
        self.orders.append((path, body))
        answer = self.answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer


class PlayedFeed(JobFeed):
    """The view of a job, which `is_over` when its driver has gone."""

    control: Any

    def __init__(self, directory: Path) -> None:
        self.job = KnownJob(JOB, directory, {}, None, has_driver=True)
        self.control = PlayedControl()
        self.model = Model()
        self.is_over = False
        self.looks = 0

    def next(self) -> View | None:
        self.looks += 1
        state = {**STATE, "workers": [], "hosts": []}
        return None if self.is_over else self.model.view(state, (), 3.0)


class Job:
    """A job whose page is served."""

    def __init__(self, directory: Path, server: WebServer) -> None:
        self.directory = directory
        self.feed = PlayedFeed(directory)
        self.access = Access(JOB, server.address, server.port, is_tls=server.certificate is not None)
        self.page = JobPage(self.feed, self.access)
        self.port = server.port


class Browser:
    """Asks as a browser does that has opened the page."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.fields: dict[str, str] = {}

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None, **fields: str) -> tuple[int, bytes]:
        connection = self.connect()
        sent = {**self.fields, **{name.replace("_", "-"): value for name, value in fields.items()}}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        self.headers = answer.headers
        data = answer.read()
        connection.close()
        return answer.status, data

    def enter(self, token: str, more: str = "") -> int:
        status, data = self.ask("POST", "/session", Authorization=f"Bearer {token}")
        if status == 200:
            cookie = self.headers["Set-Cookie"]
            assert cookie.endswith(f"; HttpOnly; SameSite=Strict; Path=/{more}")
            self.fields = {
                "Cookie": f"other=1; {cookie.partition(';')[0]}",
                "Authorization": f"Bearer {json.loads(data)['key']}",
            }
        return status


class PrivateBrowser(Browser):
    """A browser that accepts any certificate."""

    def connect(self) -> HTTPConnection:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return HTTPSConnection("127.0.0.1", self.port, timeout=60, context=context)


@pytest.fixture
def serve():
    """Serve by a server until the end of the test."""
    with ExitStack() as stack:
        yield lambda server, respond: stack.enter_context(server.serving(respond))


@pytest.fixture
def job(tmp_path, serve):
    server = WebServer(None)
    assert server.url == f"http://127.0.0.1:{server.port}"
    job = Job(tmp_path, server)
    serve(server, job.page.respond)
    return job


@pytest.fixture
def browser(job):
    browser = Browser(job.port)
    assert browser.enter(job.access.new_token()) == 200
    return browser


def test_a_browser_with_the_token_sees_the_job(browser):
    status, data = browser.ask("GET", "/view")
    assert status == 200
    assert json.loads(data)["id"] == JOB


def test_a_token_is_good_once(job):
    token = job.access.new_token()
    assert [Browser(job.port).enter(token) for _ in range(2)] == [200, 401]


@pytest.mark.parametrize("token", ["", "0" * 32, "x"])
def test_a_wrong_token_is_refused(job, token):
    other = Browser(job.port)
    assert other.enter(token) == 401
    assert other.ask("GET", "/view")[0] == 401


def test_a_token_grows_old():
    now = [0.0]
    access = Access(JOB, "127.0.0.1", 1, clock=lambda: now[0])
    first, second = ({"authorization": f"Bearer {access.new_token()}"} for _ in range(2))
    now[0] = 599.0
    assert access.let_in(first) is not None
    now[0] = 601.0
    assert access.let_in(second) is None


@pytest.mark.parametrize("lacking", ["Cookie", "Authorization"])
def test_the_cookie_without_the_key_is_not_enough_nor_the_key_without_the_cookie(browser, lacking):
    del browser.fields[lacking]
    assert [browser.ask(*one)[0] for one in (("GET", "/view"), ("GET", "/output"), ("POST", "/stop"))] == [
        401
    ] * 3


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1", "Host": "localhost:1"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Transfer_Encoding": "chunked"}, 501),
    ],
)
def test_other_sites_may_not_ask(browser, fields, status):
    assert browser.ask("GET", "/view", **fields)[0] == status


def test_a_repeated_host_field_is_refused(browser):
    with socket.create_connection(("127.0.0.1", browser.port), timeout=60) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 400 ")


def test_the_page_is_public_and_loads_only_its_own_files(job):
    stranger = Browser(job.port)
    status, page = stranger.ask("GET", "/", Sec_Fetch_Site="cross-site")
    assert status == 200
    assert stranger.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
    assert stranger.headers["X-Content-Type-Options"] == "nosniff"
    assert JOB.encode() not in page
    assert b"http" not in page
    assert stranger.ask("GET", "/main.js")[0] == 200
    assert stranger.ask("GET", "/__init__.py")[0] == 401
    assert stranger.ask("GET", "/../keys.json")[0] == 401


def test_orders_are_passed_on(job, browser):
    orders = job.feed.control.orders
    assert browser.ask("POST", "/signal", b'{"signal": "USR1"}') == (200, b"{}")
    assert json.loads(browser.ask("POST", "/stacks", b"{}")[1]) == {"summary": "no workers", "lines": []}
    assert orders == [("/signal", {"signal": "USR1"}), ("/stacks", {})]
    assert browser.ask("POST", "/page", b"{}")[0] == 404
    assert browser.ask("GET", "/job")[0] == 404
    assert browser.ask("POST", "/signal", b"no json")[0] == 400
    assert browser.ask("POST", "/signal", Content_Length=str((1 << 20) + 1))[0] == 400
    assert len(orders) == 2


def test_refusals_of_the_driver_are_shown_and_a_successor_is_used(job, browser):
    answers = job.feed.control.answers
    answers["/signal"] = ControlRefused("job x: no such signal")
    assert browser.ask("POST", "/signal", b"{}") == (400, b"job x: no such signal\n")
    answers["/signal"] = DriverGone("it does not answer")
    assert browser.ask("POST", "/signal", b"{}") == (503, b"the driver is busy\n")


def test_the_end_is_shown_with_the_report_and_stays(job, browser):
    assert json.loads(browser.ask("GET", "/view")[1])["ending"] is None
    job.page._newest = (0.0, b"old")  # so that it is made anew
    job.feed.model.add_events([ENDED])
    view = json.loads(browser.ask("GET", "/view")[1])
    assert (view["ending"]["exit_code"], view["report"]) == (7, {"outcome": "failed"})
    job.page.await_viewers()
    job.feed.is_over = True
    job.page._newest = (0.0, job.page._newest[1])
    assert json.loads(browser.ask("GET", "/view")[1]) == view


def test_the_report_of_a_driver_that_has_gone_is_read_from_the_directory(job, browser):
    job.feed.control.answers["/report?wait=5"] = DriverGone("it does not answer")
    (job.directory / "report.json").write_text('{"outcome": "kept"}')
    job.feed.model.add_events([ENDED])
    assert json.loads(browser.ask("GET", "/view")[1])["report"] == {"outcome": "kept"}


def test_a_job_that_is_over_without_a_last_event_has_no_view(job, browser):
    job.feed.is_over = True
    assert browser.ask("GET", "/view")[0] == 503


def test_browsers_share_a_view(job, browser):
    other = Browser(job.port)
    assert other.enter(job.access.new_token()) == 200
    views = [one.ask("GET", "/view")[1] for one in (browser, other)]
    assert views[0] == views[1]
    assert job.feed.looks == 1


def test_output_is_searched(job, browser):
    store = OutputStore(job.directory, head_of(ConsoleOptions()))
    for rank in (0, 1):
        store.output(rank, "stdout", b"a needle\nhay\n")
    store.write()
    lines = json.loads(browser.ask("GET", "/output?text=NEEDLE&ranks=1")[1])["lines"]
    assert [(line["rank"], line["text"]) for line in lines] == [(1, "a needle")]
    assert len(json.loads(browser.ask("GET", "/output")[1])["lines"]) == 4
    assert browser.ask("GET", "/output?ranks=x")[0] == 400
    store.close()


def test_metrics_need_their_token(serve, monkeypatch, capsys):
    """And the token is good for nothing else."""
    statuses: list[int] = []

    def ask() -> None:
        url, token = capsys.readouterr().out.split()
        scraper = Browser(int(url.removesuffix("/metrics").rpartition(":")[2]))
        bearer = f"Bearer {token}"
        for name in ("login-node:9999", "localhost"):
            status, text = scraper.ask("GET", "/metrics", Authorization=bearer, Host=name)
            assert (status, text) == (200, b"some 1\n")
            assert scraper.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        paths = (("GET", "/view"), ("POST", "/metrics"), ("GET", "/"))
        statuses.extend(scraper.ask(*words, Authorization=bearer)[0] for words in paths)
        wrong = ("", "Bearer ", "Bearer x")
        statuses.extend(scraper.ask("GET", "/metrics", Authorization=words)[0] for words in wrong)
        monkeypatch.setattr(metrics, "_now", lambda _: None)
        statuses.append(scraper.ask("GET", "/metrics", Authorization=bearer)[0])

    monkeypatch.setattr(metrics, "await_end", lambda _: ask())
    monkeypatch.setattr(metrics, "_now", lambda job: job)
    monkeypatch.setattr(metrics, "metrics_text", lambda _: b"some 1\n")
    options: Any = type("Options", (), {"bind": None, "no_tls": False})
    assert metrics._scrape(KnownJob(JOB, Path(), {}, None, has_driver=True), options) == 0
    assert statuses == [404, 404, 404, 401, 401, 401, 503]


def test_other_machines_are_let_in_by_tls_alone(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(web, "_is_loopback", lambda _: False)
    server = WebServer("127.0.0.1")
    assert server.url.startswith("https://")
    job = Job(tmp_path, server)
    serve(server, job.page.respond)
    with pytest.raises((OSError, HTTPException)):
        Browser(job.port).ask("GET", "/")
    browser = PrivateBrowser(job.port)
    assert browser.enter(job.access.new_token(), "; Secure") == 200
    assert browser.ask("GET", "/view")[0] == 200


def test_other_machines_are_let_in_without_tls_where_the_user_says_so(monkeypatch):
    monkeypatch.setattr(web, "_is_loopback", lambda _: False)
    with closing(WebServer("127.0.0.1", is_open=True)) as server:
        assert (server.url.partition(":")[0], server.certificate) == ("http", None)


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "example", "::"])
def test_an_address_of_another_machine_is_refused(address):
    with pytest.raises(BadUsage):
        WebServer(address)


def test_silent_unauthenticated_clients_do_not_keep_the_owner_out(job, browser):
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", job.port), timeout=60))
            for _ in range(200)
        ]
        assert browser.ask("GET", "/view")[0] == 200
        assert strangers[0].recv(1) == b""
