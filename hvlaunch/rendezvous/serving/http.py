"""HTTP/1 as the rendezvous speaks it: bytes to requests, answers to bytes. No sockets here.

The grammar is RFC 9112's; llhttp (by way of httptools) reads it, strictly.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import httptools

from hvlaunch.rendezvous.serving.traffic import Arriving

__all__ = [
    "CONTINUE",
    "Answer",
    "CallOff",
    "Exchange",
    "Give",
    "Head",
    "HttpLimits",
    "Later",
    "RequestReader",
    "Route",
    "render_head",
]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    412: "Precondition Failed",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one connection may cost."""

    head: int = 16 << 10
    """Bytes of a request line and its header fields."""
    body: int = 16 << 20
    """Bytes of a request's body."""
    exchange: float = 30.0
    """Seconds for a request to arrive once it has begun (or the connection is there), and for its answer to be taken."""
    idle: float = 300.0
    """Seconds between an answer and the next request."""
    linger: float = 2.0
    """Seconds that a client has to read the last answer and hang up."""
    farewell: int = 64 << 10
    """Bytes that a stranger may still send meanwhile; they are thrown away."""
    unauthenticated: float = 10.0
    """Seconds from the connection's beginning until a head with the token is there."""


class Head(NamedTuple):
    """A request before its body."""

    method: str
    target: bytes
    """Path and query, as sent."""
    authorization: bytes
    """The field's value; b"" where there is none."""
    peer: str = ""
    """The address that the connection comes from, where that is known."""


class Answer(NamedTuple):
    """What a client is told. `headers` are whole lines, each with its CRLF."""

    status: int
    body: bytes = b""
    headers: bytes = b""
    to_unauthenticated: bool = False
    """The request does not have the token. On a connection that has never shown it, this is the last answer."""


Give = Callable[[Answer], None]
CallOff = Callable[[], None]


class Later(NamedTuple):
    """An answer that something else will give."""

    begin: Callable[[Give], CallOff]
    """begin(give) calls give(answer) once, later; what it returns calls that off."""
    timeout: float
    """Seconds until `late` is the answer."""
    late: Answer


Route = Callable[[bytes], "Answer | Later"]
"""What a request's body is given to once all of it is there."""


class Exchange(NamedTuple):
    """A request that is all there, and how its answer is to be sent."""

    outcome: Answer | Route
    """What its head led to."""
    body: bytes
    keep_alive: bool
    version: str
    method: str

    def answer(self) -> Answer | Later:
        """Do what is asked for; once."""
        return self.outcome if isinstance(self.outcome, Answer) else self.outcome(self.body)


class _Stop(Exception):
    """Raised inside the parser's callbacks when the rest of the input no longer matters."""


class RequestReader:
    """Takes the bytes of one connection, gives the requests in `ready`, in order.

    `admit(head)` is asked as soon as a head is there, so that no body is kept for a request that will be
    refused: it gives an Answer (a refusal) or the Route for the body. What is malformed or too large
    becomes a last exchange with that answer, and `ended` is set: no byte after it is looked at. So does the
    first request without the token, unless one with it came before.
    """

    def __init__(
        self,
        admit: Callable[[Head], Answer | Route],
        limits: HttpLimits,
        peer: str = "",
        arriving: Arriving | None = None,
    ) -> None:
        self.ready: deque[Exchange] = deque()
        self.begun = 0
        """How many requests have begun."""
        self.partial = False
        """The last of them is not all there yet."""
        self.ended = False
        self.is_trusted = False
        """A request with the token has begun: this is no stranger."""
        self._admit = admit
        self._limits = limits
        self._peer = peer
        self._arriving = arriving or Arriving(limits.body)
        self._parser = httptools.HttpRequestParser(self)
        self._unclaimed = 0  # bytes since anything was reported: the parser hoards a field until it is whole
        self._reset()

    def _reset(self) -> None:
        self._method = ""
        self._version = ""
        self._target = b""
        self._authorization: bytes | None = None
        self._head_size = 0
        self._announced = 0
        self._outcome: Answer | Route | None = None
        self._expects_continue = False
        self._body = bytearray()  # a list of pieces would cost many times the bytes of a client's tiny chunks
        self._body_size = 0

    def forget(self) -> None:
        """The connection is gone, and what it has sent is of no use."""
        self.ready.clear()
        self._drop_body()

    def _drop_body(self) -> None:
        self._arriving.size -= len(self._body)
        self._body = bytearray()

    @property
    def awaits_continue(self) -> bool:
        """The client holds the body back until it is told to go on (RFC 9110, 10.1.1)."""
        return (
            self._expects_continue and self.partial and self._outcome is not None and self._version == "1.1"
        )

    def told_to_continue(self) -> None:
        self._expects_continue = False

    def feed(self, data: bytes) -> None:
        if self.ended:
            return
        self._unclaimed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Stop):
                raise
        except httptools.HttpParserInvalidMethodError:
            self._refuse(501)
        except httptools.HttpParserError:
            self._refuse(400)
        if self._unclaimed > self._limits.head:
            self._refuse(431)

    def give_up(self, answer: Answer) -> None:
        """End here: `answer` is the last, after those of the requests that are ready."""
        if not self.ended:
            self._end(Exchange(answer, b"", keep_alive=False, version="1.1", method=""))

    def _refuse(self, status: int) -> None:
        self.give_up(Answer(status))

    def _end(self, last: Exchange) -> None:
        self.ended = True
        self.partial = False
        self._drop_body()
        self.ready.append(last)

    def _stop(self, status: int) -> None:
        self._refuse(status)
        raise _Stop

    # What the parser calls:

    def on_message_begin(self) -> None:
        if self.ended:
            raise _Stop
        self._reset()
        self._unclaimed = 0
        self.begun += 1
        self.partial = True

    def on_url(self, piece: bytes) -> None:
        self._target += piece
        self._grow_head(len(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._outcome is not None:
            return  # a trailer: nothing in it can change what was admitted
        self._grow_head(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"authorization":
            if self._authorization is not None:
                self._stop(400)
            self._authorization = value.strip()
        elif name == b"content-length":
            self._announced = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                self._stop(501)  # the parser undoes the chunks, and would leave the rest to us
        elif name == b"expect":
            self._expects_continue = value.strip().lower() == b"100-continue"

    def _grow_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.head:
            self._stop(431)

    def on_headers_complete(self) -> None:
        self._unclaimed = 0
        self._version = self._parser.get_http_version()
        self._method = self._parser.get_method().decode("ascii")
        if self._version not in ("1.1", "1.0"):
            self._stop(505)
        if self._parser.should_upgrade():
            self._stop(501)
        head = Head(self._method, self._target, self._authorization or b"", self._peer)
        self._outcome = self._admit(head)
        if not isinstance(self._outcome, Answer) or not self._outcome.to_unauthenticated:
            self.is_trusted = True
        if not self.is_trusted:
            self._leave_body(401)
        if self._announced > self._limits.body:
            self._leave_body(413)
        if self._expects_continue and isinstance(self._outcome, Answer):
            self._leave_body(self._outcome.status)  # sooner than asking for a body to throw away

    def on_body(self, piece: bytes) -> None:
        self._unclaimed = 0
        self._body_size += len(piece)
        if self._body_size > self._limits.body:
            self._leave_body(413)
        if not isinstance(self._outcome, Answer):
            self._body += piece
            self._arriving.size += len(piece)
            if self._arriving.size > self._arriving.limit:
                self._leave_body(507)

    def _leave_body(self, status: int) -> None:
        """End without the rest of the body; a refusal that came before is the answer all the same."""
        if not isinstance(self._outcome, Answer):
            self._stop(status)
        self._end(self._exchange(keep_alive=False))
        raise _Stop

    def on_message_complete(self) -> None:
        self._unclaimed = 0
        if self._parser.should_keep_alive():
            self.partial = False
            self.ready.append(self._exchange(keep_alive=True))
        else:
            self._end(self._exchange(keep_alive=False))

    def _exchange(self, *, keep_alive: bool) -> Exchange:
        assert self._outcome is not None  # noqa: S101 (for the type checker: a body comes after its head)
        body = bytes(self._body)
        if body:
            self._drop_body()
        return Exchange(self._outcome, body, keep_alive, self._version, self._method)


def render_head(exchange: Exchange, answer: Answer) -> bytes:
    """All of the answer that comes before its body."""
    headers = answer.headers
    if not exchange.keep_alive:
        headers += b"Connection: close\r\n"
    elif exchange.version == "1.0":
        headers += b"Connection: keep-alive\r\n"
    reason = _REASONS[answer.status].encode("ascii")
    # The length comes last: a client can tell by it that no line before it was cut off with the connection.
    return b"HTTP/1.1 %d %s\r\n%sContent-Length: %d\r\n\r\n" % (
        answer.status,
        reason,
        headers,
        len(answer.body),
    )
