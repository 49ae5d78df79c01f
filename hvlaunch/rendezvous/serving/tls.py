"""The transport between a socket and a client's connection: TLS, plain HTTP, or an agent's question."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from hvlaunch.rendezvous.serving.listeners import Answerer

__all__ = ["ClientTransport", "is_loopback"]

_TLS = 0x16
"""The first byte of a TLS handshake (RFC 8446, 5.1)."""
_READ_SIZE = 1 << 18


class ClientTransport(asyncio.Transport, asyncio.Protocol):
    """A protocol for the event loop and a transport for the client's connection.

    The first byte decides: TLS (with context()), a question for `answerer`, or plain HTTP. `connect` makes the client's
    connection; its argument returns True if no other program can read or change the traffic.
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
        self._tls = (
            None  # 100 KB and more; the reference cycle with the client lives until a garbage collection
        )

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


def is_loopback(address: str) -> bool:
    """True if the address belongs to this machine only; in the form of a socket's name."""
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")
