"""What the page of `hvlaunch top --web` asks for: its own files, the view, output, and orders. docs/view.md is for users."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from hvlaunch.console.store_reader import StoreReader
from hvlaunch.console.stored import Stored
from hvlaunch.driver.doors.page_access import Access
from hvlaunch.rendezvous.serving.http import Answer, CallOff, Give, Head, Later, Route
from hvlaunch.view import page as files
from hvlaunch.view.feed import Feed
from hvlaunch.view.model import as_json
from hvlaunch.view.search import newest_lines_with
from hvlaunch.view.stacks import shown_stacks

__all__ = ["Page"]

Admit = Callable[[Head], "Answer | Route"]

_HEADERS = (
    b"Content-Security-Policy: default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\n"
    b"Cross-Origin-Resource-Policy: same-origin\r\n"
    b"Referrer-Policy: no-referrer\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
    b"Cache-Control: no-store\r\n"
)
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}
_JSON = b"application/json"
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_FRESH = 0.5
"""Seconds for which one view is good enough for all who ask."""
_NEWS_WAIT = 1
_REPORT_WAIT = 5
"""Seconds from the job's last event until its report is made, at most."""
_PATIENCE = 20.0
_FAREWELL = 1.5
"""Seconds for those who look on to see the job's end."""
_LOOKING = 3.0
_MOST_LINES = 2000
_SEGMENTS = 2
"""In which the newest lines are looked for, where no text is."""
_ORDERS = (b"/stacks", b"/signal", b"/stop")


class Page:
    """The requests. `control` serves the job's control socket; `directory` is the job's own."""

    def __init__(self, directory: Path, access: Access, control: Admit) -> None:
        self._directory = directory
        self._access = access
        self._control = control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: StoreReader | None = None
        self._feed = Feed(self._get, self._read, time.time)
        self._lock = threading.Condition()
        self._seen: tuple[float, bytes] = (0.0, b"")
        self._asked_at: float | None = None
        self._has_told_end = False

    def __call__(self, head: Head) -> Answer | Route:
        """What to do with a request's body; asked in the server's thread, as RequestReader says."""
        self._loop = asyncio.get_running_loop()
        path, _, query = head.target.partition(b"?")
        if head.method == "GET" and path == b"/metrics":
            refusal = self._access.scrape_refusal(head)
            return _marked(refusal) if refusal else lambda _body: self._later(self._metrics, _METRICS)
        file = _FILES.get(path.decode(errors="replace")) if head.method in ("GET", "HEAD") else None
        if (refusal := self._access.refusal(head, is_public=file is not None)) is not None:
            return _marked(refusal)
        if file is not None:
            kind, data = file
            return _marked(Answer(200, data(), to_stranger=True), kind)
        if path == b"/session" and head.method == "POST":
            return _marked(self._access.let_in(head), _JSON)
        if not self._access.is_let_in(head):
            return _marked(Answer(401, b"who are you?\n", to_stranger=True))
        if head.method == "GET" and path == b"/view":
            return lambda _body: self._later(self._view)
        if head.method == "GET" and path == b"/output":
            return lambda _body: self._later(lambda: self._output(query))
        if head.method == "POST" and path in _ORDERS:
            return self._order(head, path)
        return _marked(Answer(404, b"there is no such path\n"))

    def close(self) -> None:
        """The job has ended: whoever looks on gets some time to see how."""
        with self._lock:
            if self._asked_at is not None and time.monotonic() - self._asked_at < _LOOKING:
                self._lock.wait_for(lambda: self._has_told_end, _FAREWELL)

    def _view(self) -> bytes:
        """The view as JSON: soon after something has happened, or after a second."""
        self._asked_at = time.monotonic()
        if self._seen[1]:
            self._feed.await_news(_NEWS_WAIT)
        with self._lock:
            if time.monotonic() - self._seen[0] > _FRESH or self._feed.has_ended:
                found = as_json(self._feed.look())
                if self._feed.has_ended:
                    found["report"] = self._report()
                self._seen = time.monotonic(), json.dumps(found).encode()
            return self._seen[1]

    def _report(self) -> Any:
        """The job's, when it is made; None where that can't be had."""
        try:
            return self._get(f"/report?wait={_REPORT_WAIT}")
        except OSError:
            return None

    def _read(self) -> Iterator[Stored]:
        if self._reader is None:
            self._reader = StoreReader(self._directory)
            self._reader.seek_newest(1)
        return self._reader.read()

    def _output(self, query: bytes) -> bytes:
        """Lines of the job's output: `text` in them, of `ranks` (a list with commas), the newest `count`."""
        asked = {name: values[0] for name, values in parse_qs(query.decode(errors="replace")).items()}
        text = asked.get("text", "")
        ranks = {int(rank) for rank in asked["ranks"].split(",")} if asked.get("ranks") else None
        count = min(int(asked.get("count", "200")), _MOST_LINES)
        reader = StoreReader(self._directory)
        if not text:
            reader.seek_newest(_SEGMENTS)
        try:
            return json.dumps({"lines": newest_lines_with(reader.read(), text, ranks, count)}).encode()
        finally:
            reader.close()

    def _order(self, head: Head, path: bytes) -> Answer | Route:
        """Pass it on to the control socket's requests."""
        outcome = self._control(head)
        if isinstance(outcome, Answer):
            return _marked(outcome)

        def shown(answer: Answer) -> Answer:
            if path == b"/stacks" and answer.status == 200:  # noqa: PLR2004 (OK)
                body = json.dumps(shown_stacks(json.loads(answer.body))).encode()
                answer = answer._replace(body=body)
            return _marked(answer)

        def route(body: bytes) -> Answer | Later:
            answer = outcome(body)
            if isinstance(answer, Answer):
                return shown(answer)
            begin = answer.begin
            return Later(
                lambda give: begin(lambda told: give(shown(told))), answer.timeout, _marked(answer.late)
            )

        return route

    def _get(self, target: str) -> Any:
        """What the control socket gives; asked in a thread of its own. Raises OSError."""
        found: Future[Answer] = Future()
        loop = self._loop
        if loop is None:
            raise ConnectionError

        def ask() -> None:
            outcome = self._control(Head("GET", target.encode(), b""))
            answer = outcome if isinstance(outcome, Answer) else outcome(b"")
            if isinstance(answer, Answer):
                found.set_result(answer)
            else:
                _begin(answer, found)

        loop.call_soon_threadsafe(ask)
        try:
            answer = found.result(_PATIENCE)
        except FutureTimeout:
            raise ConnectionError from None
        if answer.status == 404:  # noqa: PLR2004 (Not Found)
            return None
        if answer.status != 200:  # noqa: PLR2004 (OK)
            raise ConnectionError(answer.body.decode(errors="replace").strip())
        return json.loads(answer.body)

    def _metrics(self) -> bytes:
        """For who scrapes them."""
        from hvlaunch.telemetry.metrics import JobNow, metrics_text  # noqa: PLC0415 (few who look on are Prometheus)

        samples = self._get("/samples")  # first, since these take a moment
        totals, state = self._get("/totals"), self._get("/job")
        return metrics_text([JobNow(state, totals, samples, time.time())])

    def _later(self, work: Callable[[], bytes], kind: bytes = _JSON) -> Later:
        """Do it in a thread of its own: the server's has others to serve."""

        def begin(give: Give) -> CallOff:
            loop = asyncio.get_running_loop()
            is_over = False

            def settle(answer: Answer) -> None:
                if not is_over:
                    give(answer)

            def call_off() -> None:
                nonlocal is_over
                is_over = True

            def run() -> None:
                answer = self._do(work, kind)
                try:
                    loop.call_soon_threadsafe(settle, answer)
                except RuntimeError:  # the loop has been closed
                    return
                with self._lock:
                    self._has_told_end = self._feed.has_ended
                    self._lock.notify_all()

            threading.Thread(target=run, name="page", daemon=True).start()
            return call_off

        return Later(begin, 2 * _PATIENCE, _marked(Answer(503, b"the driver is busy\n")))

    @staticmethod
    def _do(work: Callable[[], bytes], kind: bytes) -> Answer:
        try:
            return _marked(Answer(200, work()), kind)
        except (ValueError, KeyError):
            return _marked(Answer(400, b"the query is not understood\n"))
        except (OSError, RuntimeError):  # the job is ending, or its directory is gone
            return _marked(Answer(503, b"the driver is busy\n"))


def _begin(later: Later, found: "Future[Answer]") -> None:
    """In the server's thread."""
    call_off: list[CallOff] = []

    def settle(answer: Answer) -> None:
        if not found.done():
            found.set_result(answer)
            timer.cancel()

    def give_up() -> None:
        for call in call_off:
            call()
        settle(later.late)

    timer = asyncio.get_running_loop().call_later(later.timeout, give_up)
    call_off.append(later.begin(settle))


def _marked(answer: Answer, kind: bytes = b"text/plain; charset=utf-8") -> Answer:
    """With what the browser must know of every answer."""
    return answer._replace(headers=answer.headers + _HEADERS + b"Content-Type: %s\r\n" % kind)


def _files() -> dict[str, tuple[bytes, Callable[[], bytes]]]:
    """The page's own files, by the paths at which they are served."""
    root = Path(files.__file__).parent
    found = {
        f"/{path.name}": (_TYPES[path.suffix], path.read_bytes)
        for path in root.iterdir()
        if path.suffix in _TYPES
    }
    return {**found, "/": found["/index.html"]}


_FILES = _files()
