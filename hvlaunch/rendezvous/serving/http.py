"""The rendezvous' subset of HTTP/1, with TLS or without: bytes to requests, answers to bytes, and a client's connection with answers in order.

The grammar is RFC 9112's; llhttp (through httptools) reads it, strictly. A connection bounds every way to waste the
server's time. The first byte of a connection decides: TLS, a question of an agent, or plain HTTP.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import httptools

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.serving.store_record import StoreRecord
from hvlaunch.rendezvous.serving.traffic import (
    Answerer,
    Arriving,
    HttpLimits,
    Traffic,
    is_loopback,
    plain_address,
)

__all__ = [
    "Answer",
    "CallOff",
    "ClientConnection",
    "ClientTransport",
    "Give",
    "Head",
    "Later",
    "RequestReader",
    "Route",
    "render_head",
]

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

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


class Head(NamedTuple):
    """A request before its body."""

    method: str
    target: bytes
    """Path and query, as sent."""
    authorization: bytes
    """The field's value; b"" if missing."""
    peer: str = ""
    """The client's address, if known."""
    is_private: bool = True
    """True if no other program can read or change the traffic."""


class Answer(NamedTuple):
    """An answer. `headers` are whole lines, each with its CRLF."""

    status: int
    body: bytes = b""
    headers: bytes = b""
    to_unauthenticated: bool = False
    """The request lacks the token. If its connection never had a token, this answer is the last."""


Give = Callable[[Answer], None]
CallOff = Callable[[], None]


class Later(NamedTuple):
    """An answer to be given later."""

    begin: Callable[[Give], CallOff]
    """begin(give) calls give(answer) once, later; it returns a function to cancel."""
    timeout: float
    """Seconds until `late` is the answer."""
    late: Answer


Route = Callable[[bytes], "Answer | Later"]
"""Takes the complete body of a request."""


class Exchange(NamedTuple):
    """A complete request, and how to send its answer."""

    outcome: Answer | Route
    """The decision on its head."""
    body: bytes
    keep_alive: bool
    version: str
    method: str

    def answer(self) -> Answer | Later:
        """Execute the request; call once."""
        return self.outcome if isinstance(self.outcome, Answer) else self.outcome(self.body)


class _Stop(Exception):
    """Raised inside callbacks of the parser to ignore the rest of the input."""


class RequestReader:
    """Takes the bytes of a connection and puts its requests into `ready`, in order.

    `admit(head)` is called for each head, before its body: a refused request costs no memory. It returns an Answer (a
    refusal) or the Route for the body. `is_private()` gives each head its value at that moment. Malformed or oversized input becomes a last exchange with its refusal, and sets
    `ended`: later bytes are ignored. The same happens to a first request without the token.
    """

    def __init__(
        self,
        admit: Callable[[Head], Answer | Route],
        limits: HttpLimits,
        peer: str = "",
        arriving: Arriving | None = None,
        is_private: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ready: deque[Exchange] = deque()
        self.begun = 0
        """The number of requests begun."""
        self.partial = False
        """True if the newest of them is incomplete."""
        self.ended = False
        self.is_trusted = False
        """True after a request with the token."""
        self._admit = admit
        self._limits = limits
        self._peer = peer
        self._arriving = arriving or Arriving(limits.body)
        self._is_private = is_private
        self._parser = httptools.HttpRequestParser(self)
        # Bytes since the last callback: the parser buffers a field until its end, and a field may
        # never end.
        self._unclaimed = 0
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
        # A list of tiny chunks would cost many times their bytes.
        self._body = bytearray()
        self._body_size = 0

    def forget(self) -> None:
        """Free the memory of a closed connection's requests."""
        self.ready.clear()
        self._drop_body()

    def _drop_body(self) -> None:
        self._arriving.size -= len(self._body)
        self._body = bytearray()

    @property
    def awaits_continue(self) -> bool:
        """True if the client waits for permission to send its body (RFC 9110, 10.1.1)."""
        return (
            self._expects_continue and self.partial and self._outcome is not None and self._version == "1.1"
        )

    def permit_body(self) -> None:
        self._expects_continue = False

    def feed(self, data: bytes) -> None:
        if self.ended:
            return
        self._unclaimed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # Any other exception is a defect of this server.
            if not isinstance(error.__context__, _Stop):
                raise
        except httptools.HttpParserInvalidMethodError:
            self._refuse(501)
        except httptools.HttpParserError:
            self._refuse(400)
        # A header field without an end never reaches a callback.
        if self._unclaimed > self._limits.head:
            self._refuse(431)

    def give_up(self, answer: Answer) -> None:
        """End the input: `answer` is the last, behind those of complete requests."""
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

    # Called by the parser:

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
            # A trailer: too late to change the decision.
            return
        self._grow_head(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"authorization":
            # Two credentials: a proxy on the way might check the other.
            if self._authorization is not None:
                self._stop(400)
            self._authorization = value.strip()
        elif name == b"content-length":
            self._announced = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                # httptools decodes chunks, and no other coding.
                self._stop(501)
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
        # CONNECT, or a field "Upgrade", would make the parser take the bytes behind it for another
        # protocol.
        if self._parser.should_upgrade():
            self._stop(501)
        head = Head(self._method, self._target, self._authorization or b"", self._peer, self._is_private())
        self._outcome = self._admit(head)
        if not isinstance(self._outcome, Answer) or not self._outcome.to_unauthenticated:
            self.is_trusted = True
        if not self.is_trusted:
            self._leave_body(401)
        # Refused before the transfer: the client need not send a useless body.
        if self._announced > self._limits.body:
            self._leave_body(413)
        if self._expects_continue and isinstance(self._outcome, Answer):
            # An answer now, instead of inviting a useless body.
            self._leave_body(self._outcome.status)

    def on_body(self, piece: bytes) -> None:
        self._unclaimed = 0
        self._body_size += len(piece)
        # The announced length may be missing or wrong: chunks announce nothing.
        if self._body_size > self._limits.body:
            self._leave_body(413)
        if not isinstance(self._outcome, Answer):
            self._body += piece
            self._arriving.size += len(piece)
            # The limit for the bodies of all connections, together.
            if self._arriving.size > self._arriving.limit:
                self._leave_body(507)

    def _leave_body(self, status: int) -> None:
        """End without the rest of the body. An earlier refusal stays the answer."""
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
    """Return the answer's head."""
    headers = answer.headers
    if not exchange.keep_alive:
        headers += b"Connection: close\r\n"
    elif exchange.version == "1.0":
        headers += b"Connection: keep-alive\r\n"
    reason = _REASONS[answer.status].encode("ascii")
    # The length comes last: its presence proves a complete head to the client.
    head = b"HTTP/1.1 %d %s\r\n%sContent-Length: %d\r\n\r\n"
    return head % (answer.status, reason, headers, len(answer.body))


# A longer body is written separately, without a copy.
_COPY_LIMIT = 64 << 10
_TOO_MANY = Answer(429, b"too many connections\n")


class ClientConnection(asyncio.Protocol):
    """Reads requests, and asks `admit` about each (see RequestReader).

    `is_private` returns True if no other program can read or change the traffic. It is asked for each request: the answer
    changes when a TLS handshake is done.

    No answer leaves while `record` is behind: it might reveal changes not on disk yet.

    While an answer is pending, or is not taken by the client, at most one more read is buffered: no client can make the
    server hold more.
    """

    def __init__(
        self,
        admit: Callable[[Head], Answer | Route],
        limits: HttpLimits,
        traffic: Traffic[ClientConnection],
        record: StoreRecord | None = None,
        is_private: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._limits = limits
        self._traffic = traffic
        self._record = record
        self._admit = admit
        self._is_private = is_private
        self._reader: RequestReader
        self._transport: asyncio.Transport
        self.peer = ""
        """The client's address; "" if unknown."""
        self._answered = 0
        self._pending: Exchange | None = None
        self._held: tuple[Exchange, Answer] | None = None
        self._call_off: CallOff = _nothing
        self._late: asyncio.TimerHandle | None = None
        self._choked = False
        self._lingering = False
        self._thrown_away = 0
        self._phase: tuple[str, int, int] | None = None
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.lost: asyncio.Future[None] = self._loop.create_future()

    # Called by the event loop:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = plain_address(transport.get_extra_info("peername"))
        self._reader = RequestReader(
            self._admit, self._limits, self.peer, self._traffic.arriving, self._is_private
        )
        if not self._traffic.enter(self):
            self._turn_away()
        self._pace()

    def data_received(self, data: bytes) -> None:
        # The last answer is sent. More input is read and dropped, for an orderly end.
        if self._lingering:
            self._thrown_away += len(data)
            # An authenticated client may have sent requests in advance; an unauthenticated flood is cut.
            if self._thrown_away > self._limits.farewell and not self._reader.is_trusted:
                self._transport.abort()
            return
        self._reader.feed(data)
        if self._reader.is_trusted:
            self._traffic.trust(self)
        self._advance()

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio.Protocol's signature)
        self._forget_pending()
        self._held = None
        self._reader.forget()
        if self._timer is not None:
            self._timer.cancel()
        self._traffic.leave(self)
        self.lost.set_result(None)

    # Called by the server:

    def close(self, answer: Answer) -> None:
        """Close now, with `answer` to a pending request."""
        exchange = self._forget_pending()
        if exchange is not None and not self._transport.is_closing():
            self._write(exchange._replace(keep_alive=False), answer)
        self._transport.close()

    def abort(self) -> None:
        self._forget_pending()
        self._held = None
        self._transport.abort()

    # Answers, in order:

    def _advance(self) -> None:
        ready = self._reader.ready
        while (
            ready
            and self._pending is None
            and self._held is None
            and not self._choked
            and not self._transport.is_closing()
        ):
            exchange = ready.popleft()
            answer = exchange.answer()
            if isinstance(answer, Later):
                self._wait(exchange, answer)
            else:
                self._send(exchange, answer)
        if self._held is not None:
            # _release() continues, before any further read.
            return
        if self._reader.awaits_continue and not ready and self._pending is None and not self._choked:
            self._reader.permit_body()
            # Only now: the client's body is wanted, and no earlier answer is pending.
            self._transport.write(_CONTINUE)
        self._pace()

    def _wait(self, exchange: Exchange, later: Later) -> None:
        self._pending = exchange
        self._late = self._loop.call_later(later.timeout, self._settle, later.late)
        self._call_off = later.begin(self._settle)

    def _settle(self, answer: Answer) -> None:
        exchange = self._forget_pending()
        if exchange is None or self._transport.is_closing():
            return
        self._send(exchange, answer)
        # Later: this runs inside another connection's put, and the next request may be a put too.
        self._loop.call_soon(self._advance)

    def _turn_away(self) -> None:
        # A flood of refused clients must not keep the server busy with answers.
        if self._traffic.may_part_slowly:
            self._reader.give_up(_TOO_MANY)
            self._advance()
        else:
            self._transport.abort()

    def _forget_pending(self) -> Exchange | None:
        exchange, self._pending = self._pending, None
        self._call_off()
        self._call_off = _nothing
        if self._late is not None:
            self._late.cancel()
            self._late = None
        return exchange

    def _send(self, exchange: Exchange, answer: Answer) -> None:
        if self._record is not None and self._record.is_behind:
            self._held = exchange, answer
            self._record.then(self._release)
        else:
            self._deliver(exchange, answer)

    def _release(self) -> None:
        """Deliver the held answer: its changes are on disk."""
        held, self._held = self._held, None
        if held is not None and not self._transport.is_closing():
            self._deliver(*held)
            self._advance()

    def _deliver(self, exchange: Exchange, answer: Answer) -> None:
        self._write(exchange, answer)
        if not exchange.keep_alive:
            # Closing at once, with unread input, would reset the connection and might lose the answer.
            self._lingering = True
            self._reader.ready.clear()
            self._transport.write_eof()

    def _write(self, exchange: Exchange, answer: Answer) -> None:
        self._answered += 1
        self._traffic.answers[answer.status] += 1
        head = render_head(exchange, answer)
        body = b"" if exchange.method == "HEAD" else answer.body
        # A single write is a single packet for a small answer.
        if len(body) <= _COPY_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    # Pace: when to read, and how long to wait.

    def _pace(self) -> None:
        if self._transport.is_closing():
            return
        reader = self._reader
        # Backpressure: unread input stays in the kernel, and slows the client.
        if not self._lingering and (self._choked or (self._pending is not None and reader.ready)):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        limits = self._limits
        if self._choked:
            self._be_patient("take", limits.exchange)
        elif self._lingering:
            self._be_patient("linger", limits.linger)
        elif self._pending is not None:
            self._be_patient("wait", None)
        elif not reader.is_trusted:
            # Further bytes do not prolong this time.
            self._be_patient("arrive", limits.unauthenticated - (self._loop.time() - self._begun))
        elif reader.partial or not reader.begun:
            self._be_patient("arrive", limits.exchange)
        else:
            self._be_patient("idle", limits.idle)

    def _be_patient(self, phase: str, seconds: float | None) -> None:
        """Drop the client if it is still in this phase, with the same request, after so many seconds."""
        now_in = phase, self._reader.begun, self._answered
        if now_in == self._phase:
            return
        self._phase = now_in
        self._deadline = None if seconds is None else self._loop.time() + seconds
        # An old timer re-arms itself when it fires early: most requests touch no timer.
        if self._deadline is not None and (self._timer is None or self._deadline < self._timer_at):
            self._arm(self._deadline)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None or self._transport.is_closing():
            return
        if self._loop.time() < self._deadline:
            self._arm(self._deadline)
            return
        phase = self._phase[0] if self._phase else ""
        if phase == "linger":
            self._transport.abort()
            return
        # The client was too slow, or idle.
        self._traffic.dropped += 1
        if phase == "arrive" and self._reader.partial:
            self._reader.give_up(Answer(408))
            self._advance()
        else:
            self._transport.abort()


def _nothing() -> None:
    pass


_TLS = 0x16
"""The first byte of a TLS handshake (RFC 8446, 5.1)."""
_READ_SIZE = 1 << 18


class ClientTransport(asyncio.Transport, asyncio.Protocol):
    """A protocol for the event loop and a transport for the client's connection.

    TLS needs context(), and a question `answerer`. `connect` makes the client's connection; its argument returns True if no other
    program can read or change the traffic.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[], bool]], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext] | None,
        answerer: Answerer | None,
    ) -> None:
        super().__init__()
        self._client = connect(lambda: self._is_private)
        self._context = context
        self._answerer = answerer
        self._transport: asyncio.Transport
        self._is_private = False
        self._tls: ssl.SSLObject | None = None
        self._is_open = False
        """The connection may speak: the first byte has come, or the TLS handshake is done."""
        self._shaking = False
        self._has_parted = False
        self._question: bytes | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()

    # Called by the event loop:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        ends = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        # The loopback interface is private: other users can't read it.
        self._is_private = all(end and is_loopback(str(end[0])) for end in ends)
        self._client.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if not self._is_open and not self._shaking and self._question is None:
            self._begin(data)
        if self._question is not None:
            self._hear_question(data)
        elif self._tls is not None:
            self._hear_tls(data)
        else:
            self._client.data_received(data)

    def eof_received(self) -> bool | None:
        return self._client.eof_received()

    def pause_writing(self) -> None:
        self._client.pause_writing()

    def resume_writing(self) -> None:
        self._client.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.connection_lost(exc)
        # 100 KB and more; the reference cycle with the client lives until a garbage collection.
        self._tls = None

    def _begin(self, data: bytes) -> None:
        # A TLS record begins with 0x16, HTTP with a letter, a question with its mark.
        if data[0] == _TLS and self._context is not None:
            self._tls = self._context().wrap_bio(self._incoming, self._outgoing, server_side=True)
            self._shaking = True
        elif self._answerer is not None and data[0] == self._answerer.mark[0]:
            self._question = b""
        else:
            self._is_open = True

    def _hear_question(self, data: bytes) -> None:
        """Answer the question, or hang up: nothing follows on this connection."""
        answerer = self._answerer
        if self._question is None or answerer is None:
            return
        self._question += data
        if len(self._question) < answerer.size:
            return
        local = self._transport.get_extra_info("sockname")
        answer = answerer.answer(self._question, [local[0]], local[1])
        if answer is not None:
            self._transport.write(answer)
        self._transport.close()

    def _hear_tls(self, data: bytes) -> None:
        """Pass decrypted data on; an undecryptable byte ends the connection."""
        if self._has_parted:
            return  # OpenSSL refuses to read after its own end of TLS
        self._incoming.write(data)
        try:
            if self._shaking and not self._shake_hands():
                return
            text = self._decrypt()
        except ssl.SSLError:
            # The alert tells the client the reason.
            self._flush()
            self._transport.abort()
            return
        self._flush()
        if text:
            self._client.data_received(text)

    def _shake_hands(self) -> bool:
        assert self._tls is not None  # noqa: S101 (for the type checker: there is no handshake without it)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        self._shaking, self._is_open, self._is_private = False, True, True
        return True

    def _decrypt(self) -> bytes:
        assert self._tls is not None  # noqa: S101 (as above)
        pieces = []
        try:
            while piece := self._tls.read(_READ_SIZE):
                pieces.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(pieces)

    def _flush(self) -> None:
        if self._outgoing.pending and not self._transport.is_closing():
            self._transport.write(self._outgoing.read())

    # Called by the client's connection:

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._tls is None:
            self._transport.write(data)
        elif self._is_open and not self._transport.is_closing():
            self._tls.write(data)
            self._flush()

    def write_eof(self) -> None:
        self._part()
        self._transport.write_eof()

    def close(self) -> None:
        if not self._transport.is_closing():
            self._part()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _part(self) -> None:
        """Send TLS' end mark: without it, a client can't tell a complete answer from a truncated answer."""
        if self._tls is None or not self._is_open or self._has_parted:
            return
        self._has_parted = True
        with suppress(ssl.SSLError):  # the client's own end mark is still missing
            self._tls.unwrap()
        self._flush()
