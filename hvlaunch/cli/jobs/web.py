"""The page of a job in browsers: a small web server of one user, its access control, and the page's answers. `hvlaunch metrics --scrape` uses the server too."""

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from hvlaunch import view
from hvlaunch.cli.jobs.feed import JobFeed
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.console.output_store import StoreReader
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside import REPORT, await_end
from hvlaunch.outside.control import ControlRefused, DriverGone
from hvlaunch.view.text import newest_lines_with, shown_stacks, view_record

if TYPE_CHECKING:
    import ssl

    from hvlaunch.rendezvous.serving.certificate import Certificate

__all__ = ["Access", "Admission", "JobPage", "Refusal", "WebAnswer", "WebRequest", "WebServer", "has_bearer"]

_LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 (they are refused)
_PATIENCE = 10.0
"""Seconds for a client to send the next part of a request, or to take an answer."""
_MOST_CLIENTS = 128
_LONGEST_BODY = 1 << 20
_ONCE = ("authorization", "content-length", "cookie", "host", "origin", "sec-fetch-site")
"""Header fields that decide whether a request is answered; a request that repeats a field is malformed."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    413: "Content Too Large",
    421: "Misdirected Request",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class WebAnswer(NamedTuple):
    """The answer to a request. `fields` are header fields beside the type and the length."""

    status: int
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    fields: Mapping[str, str] = {}


class WebRequest(NamedTuple):
    """A request whose body has not been read yet. Names in `fields` are in small letters."""

    method: str
    path: str
    query: str
    fields: Mapping[str, str]
    trust: Callable[[], None]
    """Says that the client has shown its secrets: its connection is not closed in favour of others."""
    read_body: Callable[[], bytes]
    """Raises ValueError if the body is malformed or too long, OSError if it does not come."""


class WebServer(ThreadingMixIn, TCPServer):
    """Serves until close(), with a thread for each request, and a connection for each.

    Any user of the machine may connect, so unauthenticated clients must not keep the owner out: with too many connections,
    the oldest without a secret is closed.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: str | None, *, is_open: bool = False) -> None:
        """Listen at a free port of `address`, None for this machine alone.

        Another address than a loopback is served by TLS with a new certificate, unless it `is_open`. Raises BadUsage.
        """
        self.address = address or _LOOPBACK
        self.address_family = _family(self.address)
        self.certificate = None if is_open or _is_loopback(self.address) else _new_certificate()
        self._context = None if self.certificate is None else _tls(self.certificate)
        self._respond: Callable[[WebRequest], WebAnswer]
        self._clients: dict[socket.socket, bool] = {}
        """The open connections, the oldest first, and whether each is trusted."""
        self._lock = threading.Lock()
        try:
            super().__init__((self.address, 0), _Handler)
        except OSError as error:
            raise _not_served(self.address, (error.strerror or str(error)).lower()) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the server, without a slash at its end."""
        name = f"[{self.address}]" if ":" in self.address else self.address
        return f"{'http' if self.certificate is None else 'https'}://{name}:{self.port}"

    def close(self) -> None:
        """Listen no more."""
        self.server_close()

    @contextmanager
    def serving(self, respond: Callable[[WebRequest], WebAnswer]) -> Iterator[None]:
        """Serve while in the block. `respond` is called in many threads."""
        self._respond = respond
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="web", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.close()

    def run(
        self,
        respond: Callable[[WebRequest], WebAnswer],
        address: str,
        *,
        introduction: str,
        risk: str,
        wait: Callable[[], object],
    ) -> int:
        """Print the address, and serve in the foreground until `wait` returns or Ctrl-C; return the exit code.

        Without TLS, whoever reads the network's traffic can do what `risk` says.
        """
        with self.serving(respond):
            if self.certificate is not None:
                complain(
                    f"check that the browser or program gets this certificate: {self.certificate.fingerprint}"
                )
            elif not _is_loopback(self.address):
                complain(f"anyone who can read this network's traffic {risk}")
            complain(f"{introduction}; Ctrl-C ends it:")
            if code := print_answer(f"{address}\n"):
                return code
            with suppress(KeyboardInterrupt):
                wait()
        return 0

    def respond(self, request: WebRequest, client: socket.socket) -> WebAnswer:
        """Answer a request of this client. Raises OSError, ValueError as WebRequest.read_body does."""
        return self._respond(request._replace(trust=lambda: self._trust(client)))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread of its own; called by socketserver."""
        with self._lock:
            if len(self._clients) >= _MOST_CLIENTS:
                self._evict_unauthenticated()
            # Every connection is trusted: refuse the new one.
            if is_full := len(self._clients) >= _MOST_CLIENTS:
                request.close()
            else:
                self._clients[request] = False
        if not is_full:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection, in its thread; called by socketserver."""
        # A client that sends nothing must not hold its thread for ever.
        request.settimeout(_PATIENCE)
        # OSError: the client has gone, or speaks no TLS.
        with suppress(OSError):
            if self._context is not None:
                # A copy, since wrap_socket() detaches the socket that the server knows.
                with self._context.wrap_socket(request.dup(), server_side=True) as sealed:
                    _Handler(sealed, client_address, self, request)
            else:
                _Handler(request, client_address, self, request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called by socketserver."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that sends nonsense; called by socketserver."""

    def _trust(self, client: socket.socket) -> None:
        with self._lock:
            if client in self._clients:
                self._clients[client] = True

    def _evict_unauthenticated(self) -> None:
        client_to_close = next(
            (client for client, is_trusted in self._clients.items() if not is_trusted), None
        )
        if client_to_close is not None:
            del self._clients[client_to_close]
            # The client's thread may have closed the connection already.
            with suppress(OSError):
                client_to_close.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Reads one request of a connection, and writes the answer."""

    protocol_version = "HTTP/1.1"
    server: WebServer

    def __init__(
        self, connection: Any, client_address: Any, server: WebServer, client: socket.socket | None = None
    ) -> None:
        """`client` is the connection as the server knows it, below TLS."""
        self._client = client or connection
        super().__init__(connection, client_address, server)

    def do_GET(self) -> None:
        """Answer GET, HEAD and POST alike: what is allowed depends on the path."""
        # One request for each connection: a browser's idle ones would count as clients.
        self.close_connection = True
        try:
            answer = self._answer()
        except ValueError as error:
            answer = WebAnswer(400, f"{error}\n".encode())
        self.send_response_only(answer.status, _REASONS[answer.status])
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        for name, value in answer.fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_POST = do_GET  # noqa: N815 (as above)

    def _answer(self) -> WebAnswer:
        if any(len(self.headers.get_all(name, ())) > 1 for name in _ONCE):
            return WebAnswer(400, b"a header field is there twice\n")
        # Chunked bodies are a way to smuggle requests, and no client of ours sends them.
        if "transfer-encoding" in self.headers:
            return WebAnswer(501, b"the body needs a length\n")
        path, _, query = self.path.partition("?")
        fields = {name.lower(): value.strip() for name, value in self.headers.items()}
        request = WebRequest(self.command, path, query, fields, lambda: None, self._read_body)
        return self.server.respond(request, self._client)

    def _read_body(self) -> bytes:
        size = self.headers.get("content-length", "0").strip()
        if not (size.isascii() and size.isdigit() and int(size) <= _LONGEST_BODY):
            raise ValueError("the body is too long, or its length is not a number")
        body = self.rfile.read(int(size))
        if len(body) < int(size):
            raise ConnectionResetError
        return body

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal is for the user."""


def _family(address: str) -> socket.AddressFamily:
    """Raises BadUsage."""
    # Named addresses only: no other network must get the page by accident.
    if address in _EVERYWHERE:
        raise BadUsage(f"{address} means every address: name one", hint="--bind ADDRESS")
    try:
        return socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
    except OSError as error:
        raise _not_served(address, (error.strerror or str(error)).lower()) from None


def _not_served(address: str, cause: str) -> BadUsage:
    return BadUsage(f"{address}: {cause}", hint="--bind with an address of this machine")


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def _new_certificate() -> "Certificate":
    from hvlaunch.rendezvous.serving.certificate import Certificate  # noqa: PLC0415 (with --bind alone)

    return Certificate()


def _tls(certificate: "Certificate") -> "ssl.SSLContext":
    from hvlaunch.rendezvous.serving.certificate import tls_context  # noqa: PLC0415 (with --bind alone)

    return tls_context(certificate)


_LIFE = 600.0
"""Seconds in which a token must be used."""
_OWN_NAMES = frozenset(("127.0.0.1", "localhost", "[::1]"))
_BEARER = "Bearer "


class Refusal(NamedTuple):
    """The answer to a request that is not allowed."""

    status: int
    reason: str


class Admission(NamedTuple):
    """A browser's secrets. `cookie` is the value of a Set-Cookie field."""

    cookie: str
    key: str


class Access:
    """Checks requests by their header fields, whose names are in small letters.

    A browser shows two secrets. Scripts can't read the cookie, and the browser sends the key to no other port: browsers
    send cookies to every port of a machine, and therefore to the servers of its other users.
    """

    def __init__(
        self,
        job: str,
        address: str,
        port: int,
        *,
        is_tls: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The page of `job` is served at `address` and `port`. `clock` is in seconds."""
        # With the port: the same job may be served twice, and cookies are shared by all ports of a machine.
        self._cookie_name = f"hvlaunch_{job}_{port}"
        self._secure = "; Secure" if is_tls else ""
        self._names = _OWN_NAMES | {f"[{address}]" if ":" in address else address}
        self._cookie = os.urandom(32).hex()
        self._key = os.urandom(32).hex()
        self._clock = clock
        self._tokens: dict[str, float] = {}

    def new_token(self) -> str:
        """Make a token for one browser."""
        token = os.urandom(16).hex()
        self._tokens[token] = self._clock() + _LIFE
        return token

    def refusal(self, fields: Mapping[str, str], *, is_public: bool) -> Refusal | None:
        """Return why such a request gets no answer, or None. Other sites may link to public files."""
        host = fields.get("host", "")
        # DNS rebinding: another site's name may lead here.
        if _without_port(host) not in self._names:
            return Refusal(421, "the request names another host than this server")
        origin = fields.get("origin")
        is_foreign = origin is not None and origin not in (f"http://{host}", f"https://{host}")
        is_from_elsewhere = fields.get("sec-fetch-site", "none") not in ("same-origin", "none")
        if is_foreign or (is_from_elsewhere and not is_public):
            return Refusal(403, "requests from other sites are refused")
        return None

    def is_let_in(self, fields: Mapping[str, str]) -> bool:
        """Check the cookie and the key of a request."""
        pairs = [part.strip().partition("=") for part in fields.get("cookie", "").split(";")]
        cookies = [value for name, _, value in pairs if name == self._cookie_name]
        has_cookie = any(_is_same(value, self._cookie) for value in cookies)
        return has_bearer(fields, self._key) and has_cookie

    def let_in(self, fields: Mapping[str, str]) -> Admission | None:
        """Take the token of a request; None for a wrong, used or expired token."""
        shown = fields.get("authorization", "").removeprefix(_BEARER)
        token = next((token for token in self._tokens if _is_same(token, shown)), None)
        # pop() first: a token is good once, even if it is too old.
        if token is None or self._tokens.pop(token) <= self._clock():
            return None
        # HttpOnly hides the cookie from scripts, and SameSite from requests of other sites.
        cookie = f"{self._cookie_name}={self._cookie}; HttpOnly; SameSite=Strict; Path=/{self._secure}"
        return Admission(cookie, self._key)


def has_bearer(fields: Mapping[str, str], token: str) -> bool:
    """Check that a request shows this bearer token."""
    return _is_same(fields.get("authorization", ""), _BEARER + token)


def _is_same(shown: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown.encode(errors="replace"), secret.encode())


def _without_port(host: str) -> str:
    """Remove the port, which differs for a browser behind `ssh -L`."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.startswith("[")) else host


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
