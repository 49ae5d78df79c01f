"""The page's server, by its requests: who is let in, and what is passed on. With a real server, and a control that this test plays."""

import json
import socket
import stat
from http.client import HTTPConnection
from pathlib import Path

import pytest

from hvlaunch.console.output_store import OutputStore
from hvlaunch.console.stored import head_of
from hvlaunch.driver.doors.page_access import PAGE_FILE, Access, Place, Secrets
from hvlaunch.driver.doors.page_door import PageDoor, PageNotServed
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside.care import Care
from hvlaunch.rendezvous.serving.http import Answer, Head
from hvlaunch.rendezvous.serving.server import RendezvousServer

JOB = "0123456789ab"
STATE = {"id": JOB, "name": None, "command": ["x"], "began": 1.0, "pid": 1, "phase": "running", "round": None}
TOTALS = {"seconds": 2.0, "useful_seconds": 1.0, "rounds": 1, "restarts": 0, "lost_hosts": 0}
ANSWERS = {
    b"/totals": {**TOTALS, "recoveries": {"bounds": [], "counts": [0], "seconds": 0.0}},
    b"/job": {**STATE, "workers": [], "hosts": []},
    b"/events": {"next": 0, "missed": 0, "events": []},
    b"/stacks": {"threads": [], "stacks": []},
    b"/signal": {},
}
HERE = {"bind": None, "is_open": False}


class Job:
    """A job's directory, and a driver that serves its page."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.orders: list[tuple[bytes, bytes]] = []
        self.care = Care()
        self.begin()

    def begin(self) -> None:
        self.server = RendezvousServer("token")
        self.server.start()
        self.door = PageDoor(
            self.directory, JOB, self.server.serve_beside, self.control, lambda: "sha256:00", self.care
        )

    def control(self, head: Head):
        path = head.target.partition(b"?")[0]
        if path not in ANSWERS:
            return Answer(404, b"there is no such path\n")

        def route(body: bytes) -> Answer:
            if head.method == "POST":
                self.orders.append((path, body))
            return Answer(200, json.dumps(ANSWERS[path]).encode())

        return route

    def url(self) -> tuple[int, str]:
        """The port and the token of the page's address."""
        where, _, token = self.door.ask(HERE)["url"].partition("/#")
        assert where.startswith("http://127.0.0.1:")
        return int(where.rpartition(":")[2]), token


class Browser:
    """Asks as a browser does that has opened the page."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.fields: dict[str, str] = {}

    def ask(self, method: str, path: str, body: bytes | None = None, **fields: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {**self.fields, **{name.replace("_", "-"): value for name, value in fields.items()}}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        self.headers = answer.headers
        data = answer.read()
        connection.close()
        return answer.status, data

    def enter(self, token: str) -> int:
        status, data = self.ask("POST", "/session", Authorization=f"Bearer {token}")
        if status == 200:
            cookie = self.headers["Set-Cookie"]
            assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
            self.fields = {
                "Cookie": f"other=1; {cookie.partition(';')[0]}",
                "Authorization": f"Bearer {json.loads(data)['key']}",
            }
        return status


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.server.close()


@pytest.fixture
def browser(job):
    port, token = job.url()
    browser = Browser(port)
    assert browser.enter(token) == 200
    return browser


def test_a_browser_with_the_token_sees_the_job(browser):
    status, data = browser.ask("GET", "/view")
    assert status == 200
    assert json.loads(data)["id"] == JOB


def test_a_token_is_good_once(job, browser):
    port, token = job.url()
    assert [Browser(port).enter(token) for _ in range(2)] == [200, 401]


@pytest.mark.parametrize("token", ["", "0" * 32, "x"])
def test_a_wrong_token_lets_nobody_in(job, token):
    other = Browser(job.url()[0])
    assert other.enter(token) == 401
    assert other.ask("GET", "/view")[0] == 401


def test_a_token_grows_old():
    now = [0.0]
    access = Access(JOB, Place("127.0.0.1", 1, is_open=False), Secrets.new(), lambda: now[0])
    heads = [Head("POST", b"/session", b"Bearer " + access.new_token().encode()) for _ in range(2)]
    now[0] = 599.0
    assert access.let_in(heads[0]).status == 200
    now[0] = 601.0
    assert access.let_in(heads[1]).status == 401


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
    ],
)
def test_other_sites_may_not_ask(browser, fields, status):
    assert browser.ask("GET", "/view", **fields)[0] == status


def test_a_host_that_is_told_twice_is_none(browser):
    with socket.create_connection(("127.0.0.1", browser.port), timeout=60) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 400 ")


def test_the_page_itself_is_no_secret_and_has_nothing_from_elsewhere(job):
    stranger = Browser(job.url()[0])
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
    assert browser.ask("POST", "/signal", b'{"signal": "USR1"}') == (200, b"{}")
    assert json.loads(browser.ask("POST", "/stacks", b"{}")[1]) == {"summary": "no workers", "lines": []}
    assert job.orders == [(b"/signal", b'{"signal": "USR1"}'), (b"/stacks", b"{}")]
    assert browser.ask("POST", "/page", b"{}")[0] == 404
    assert browser.ask("GET", "/job")[0] == 404


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


def test_the_next_driver_serves_the_same_browser_at_the_same_port(job, browser):
    assert stat.S_IMODE((job.directory / PAGE_FILE).stat().st_mode) == 0o600
    driver, minder = socket.socketpair()
    job.care.reach(driver)
    job.server.close()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:  # of another user
        other.bind(("127.0.0.1", browser.port))
    _, descriptors, _, _ = socket.recv_fds(minder, 1, 1)
    job.care = Care(None, socket.socket(fileno=descriptors[0]))
    job.begin()
    job.door.reopen()
    assert browser.ask("GET", "/view")[0] == 200
    assert job.url()[0] == browser.port
    driver.close()
    minder.close()


def test_where_the_port_was_free_for_a_moment_nobody_is_known_any_more(job, browser):
    token = job.door.ask_scrape(HERE)["token"]
    job.server.close()
    job.begin()
    job.door.reopen()
    assert not (job.directory / PAGE_FILE).exists()
    other = Browser(job.url()[0])
    assert other.ask("GET", "/view", **browser.fields)[0] == 401
    assert other.ask("GET", "/metrics", Authorization=f"Bearer {token}")[0] == 401


def test_metrics_are_for_who_has_their_token_and_that_is_good_for_nothing_else(job, browser):
    found = job.door.ask_scrape(HERE)
    assert found["url"] == f"http://127.0.0.1:{browser.port}/metrics"
    assert job.door.ask_scrape(HERE) == found
    stranger = Browser(browser.port)
    bearer = f"Bearer {found['token']}"
    status, text = stranger.ask("GET", "/metrics", Authorization=bearer, Host="login-node:9999")
    assert status == 200
    assert f'hvlaunch_goodput_ratio{{job_id="{JOB}",job_name=""}} 0.5\n'.encode() in text
    assert stranger.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert [stranger.ask("GET", path, Authorization=bearer)[0] for path in ("/view", "/output")] == [401, 401]
    assert stranger.enter(found["token"]) == 401
    for token in ("", "Bearer ", "Bearer x", browser.fields["Authorization"]):
        assert stranger.ask("GET", "/metrics", Authorization=token)[0] == 401
    assert stranger.ask("POST", "/metrics", Authorization=bearer)[0] == 401


def test_a_job_whose_page_nobody_wanted_has_none_later(job):
    job.door.reopen()
    assert not (job.directory / PAGE_FILE).exists()


def test_other_machines_are_let_in_by_tls_alone():
    head = Head("GET", b"/view", b"", "10.0.0.2", {b"host": b"10.0.0.1:80"}, is_private=False)
    place = Place("10.0.0.1", 80, is_open=False)
    secrets = Secrets.new()
    refusal = Access(JOB, place, secrets).refusal(head, is_public=False)
    assert refusal is not None
    assert refusal.status == 403
    assert Access(JOB, place, secrets).refusal(head._replace(is_private=True), is_public=False) is None
    assert Access(JOB, place._replace(is_open=True), secrets).refusal(head, is_public=False) is None


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "example", "::"])
def test_an_address_that_is_none_of_ones_own(job, address):
    with pytest.raises(PageNotServed):
        job.door.ask({"bind": address, "is_open": True})


def test_secrets_are_not_shown():
    assert repr(Secrets.new()) == "Secrets()"
