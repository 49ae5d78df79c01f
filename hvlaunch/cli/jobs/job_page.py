"""The page of one job, as `hvlaunch top --web` serves it: its files, the view, output, and orders. docs/guides/watch.md is for users."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from hvlaunch import view
from hvlaunch.cli.jobs.feed import JobFeed
from hvlaunch.cli.jobs.web_server import Access, WebAnswer, WebRequest
from hvlaunch.console.output_store import StoreReader
from hvlaunch.outside import REPORT, await_end
from hvlaunch.outside.control import ControlRefused, DriverGone
from hvlaunch.view.text import newest_lines_with, shown_stacks, view_record

__all__ = ["JobPage"]

_FIELDS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-ControlClient": "no-store",
}
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_JSON = "application/json"
_FRESH = 0.5
"""Seconds that a view is good enough for other browsers."""
_REPORT_WAIT = 5
"""Most seconds from the job's last event to its report."""
_STACKS_WAIT = 40.0
_LOOKING = 3.0
"""Seconds after its last question in which a browser counts as open."""
_FAREWELL = 3.0
"""Seconds that an open browser gets to see the job's end."""
_MOST_LINES = 2000
_SEGMENTS = 2
"""Newest segments of the store to read for the newest lines without a searched text."""


class JobPage:
    """Answers the requests of browsers, in many threads."""

    def __init__(self, feed: JobFeed, access: Access) -> None:
        self._feed = feed
        self._control = feed.control
        self._access = access
        self._looking = threading.Lock()
        self._state = threading.Condition()
        self._newest: tuple[float, bytes] = (0.0, b"")
        self._asked_at: float | None = None
        self._has_last_view = False
        """Whether the newest view has the job's end."""
        self._has_shown_end = False

    def respond(self, request: WebRequest) -> WebAnswer:
        """Answer a request. Raises OSError, ValueError as WebRequest.read_body does."""
        answer = self._answer(request)
        return answer._replace(fields={**_FIELDS, **answer.fields})

    def await_viewers(self) -> None:
        """The job has ended: give browsers that are open some time to show how."""
        with self._state:
            if self._asked_at is not None and time.monotonic() - self._asked_at < _LOOKING:
                self._state.wait_for(lambda: self._has_shown_end, _FAREWELL)

    def _answer(self, request: WebRequest) -> WebAnswer:
        file = _FILES.get(request.path) if request.method in ("GET", "HEAD") else None
        if (refusal := self._access.refusal(request.fields, is_public=file is not None)) is not None:
            return WebAnswer(refusal.status, f"{refusal.reason}\n".encode())
        if file is not None:
            return WebAnswer(200, file.read_bytes(), _KINDS[file.suffix])
        if (request.method, request.path) == ("POST", "/session"):
            entry = self._access.let_in(request.fields)
            if entry is None:
                return WebAnswer(401, b"this token is wrong, or was used before\n")
            return WebAnswer(
                200, json.dumps({"key": entry.key}).encode(), _JSON, {"Set-Cookie": entry.cookie}
            )
        # Every path below needs the cookie and the key.
        if not self._access.is_let_in(request.fields):
            return WebAnswer(401, b"who are you?\n")
        request.trust()
        work = self._routes().get((request.method, request.path))
        return WebAnswer(404, b"there is no such path\n") if work is None else self._do(work, request)

    def _routes(self) -> Mapping[tuple[str, str], Callable[[WebRequest], object]]:
        return {
            ("GET", "/view"): lambda _: self._view(),
            ("GET", "/output"): lambda request: self._output(request.query),
            ("POST", "/stacks"): lambda request: shown_stacks(self._order(request, _STACKS_WAIT)),
            ("POST", "/signal"): self._order,
            ("POST", "/stop"): self._order,
        }

    @staticmethod
    def _do(work: Callable[[WebRequest], object], request: WebRequest) -> WebAnswer:
        try:
            result = work(request)
        except ControlRefused as error:
            return WebAnswer(400, f"{error.problem.cause}\n".encode())
        except (ValueError, KeyError):
            return WebAnswer(400, b"the query is not understood\n")
        # The job is ending, or its directory is gone.
        except (OSError, DriverGone):
            return WebAnswer(503, b"the driver is busy\n")
        return WebAnswer(200, result if isinstance(result, bytes) else json.dumps(result).encode(), _JSON)

    def _view(self) -> bytes:
        """Return the view as JSON, soon after news or after a second."""
        self._asked_at = time.monotonic()
        # One browser waits for news at a time, and the others get its view.
        with self._looking:
            made_at, newest = self._newest
            is_fresh = time.monotonic() - made_at < _FRESH or self._has_last_view
            if not newest or not is_fresh:
                newest = self._next_view()
                self._newest = time.monotonic(), newest
        with self._state:
            self._has_shown_end = self._has_last_view
            self._state.notify_all()
        return newest

    def _next_view(self) -> bytes:
        """Raises DriverGone."""
        newest = self._feed.next()
        if newest is None:
            raise DriverGone("the job has ended")
        record = view_record(newest)
        if newest.ending is not None:
            record["report"] = self._report()
            self._has_last_view = True
        return json.dumps(record).encode()

    def _report(self) -> Any:
        """Return the job's failure report; None after a good end."""
        job = self._feed.job
        with suppress(DriverGone, ControlRefused):
            return self._control.get(f"/report?wait={_REPORT_WAIT}", _REPORT_WAIT)
        # The driver writes the report to the directory before it releases the lock.
        await_end(job)
        with suppress(OSError, ValueError):
            return json.loads((job.directory / REPORT).read_bytes())
        return None

    def _output(self, query: str) -> Mapping[str, object]:
        """Return lines of the job's output: with `text`, of `ranks` (a list with commas), the newest `count`."""
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        text = asked.get("text", "")
        ranks = {int(rank) for rank in asked["ranks"].split(",")} if asked.get("ranks") else None
        count = min(int(asked.get("count", "200")), _MOST_LINES)
        reader = StoreReader(self._feed.job.directory)
        if not text:
            reader.seek_newest(_SEGMENTS)
        try:
            return {"lines": newest_lines_with(reader.read(), text, ranks, count)}
        finally:
            reader.close()

    def _order(self, request: WebRequest, wait: float = 0.0) -> Any:
        """Pass an order on to the driver. Raises ValueError, OSError, DriverGone, ControlRefused."""
        return self._control.post(request.path, json.loads(request.read_body()), wait)


def _files() -> dict[str, Path]:
    """Return the page's own files, by the paths at which they are served."""
    root = Path(view.__file__).parent / "page"
    files = {f"/{path.name}": path for path in root.iterdir() if path.suffix in _KINDS}
    return {**files, "/": files["/index.html"]}


_FILES = _files()
