"""A client's connection: answers in order, and bounds on every way to waste the server's time."""

import asyncio
from collections.abc import Callable
from typing import cast

from hvlaunch.rendezvous.serving.http import (
    CONTINUE,
    Answer,
    CallOff,
    Exchange,
    Head,
    HttpLimits,
    Later,
    RequestReader,
    Route,
    render_head,
)
from hvlaunch.rendezvous.serving.store_record import StoreRecord
from hvlaunch.rendezvous.serving.traffic import Traffic, plain_address

__all__ = ["ClientConnection"]

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
        traffic: "Traffic[ClientConnection]",
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
            self._transport.write(CONTINUE)
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
            self._be_patient("arrive", limits.unauthenticated - self._age)
        elif reader.partial or not reader.begun:
            self._be_patient("arrive", limits.exchange)
        else:
            self._be_patient("idle", limits.idle)

    @property
    def _age(self) -> float:
        return self._loop.time() - self._begun

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
