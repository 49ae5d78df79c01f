"""The driver's end of relayed connections: clients of the rendezvous whose bytes arrive in frames instead of a socket.

agent/wire/relay.py has the other end, and describes the frames.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from hvlaunch.agent.wire.frames import RELAY_CHUNK as CHUNK
from hvlaunch.agent.wire.frames import RELAY_WINDOW as WINDOW
from hvlaunch.driver.process import loud

__all__ = ["HostRelay", "Rendezvous", "peer_name"]

_MUCH = 1 << 16
"""Bytes waiting for credit, beyond which the server must stop writing."""
_MOST_UNSERVED = 64
"""Frames of a host waiting for the server's thread; further frames of the host wait in its link."""
_LOOK = 1.0
"""Seconds between checks of the server's loop."""

Send = Callable[[Mapping[str, Any], bytes], None]


class Rendezvous(Protocol):
    """The rendezvous server, as the relay uses it."""

    def endpoint(self) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]: ...
    def expect(self, addresses: Iterable[str]) -> None: ...


def peer_name(host: str) -> str:
    """Return the peer name of a host's relayed clients at the rendezvous, in place of an address without a zone."""
    return f"relay:{host.partition('%')[0]}"


class HostRelay:
    """Relayed connections of a host's workers to `rendezvous`. `send` takes frames for the host, and never blocks.

    obey() and close() are for the host's own thread. Everything else happens in the rendezvous' thread, whose event loop
    is loaded for the first client.
    """

    def __init__(self, host: str, rendezvous: Rendezvous, send: Send) -> None:
        self._host = host
        self._rendezvous = rendezvous
        self._send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        self._new_client: Callable[[], asyncio.Protocol]
        self._transports: dict[int, _Transport] = {}
        self._room = threading.Semaphore(_MOST_UNSERVED)

    def obey(self, header: Mapping[str, Any], body: bytes) -> None:
        """Carry out a `relay` frame of the host's agent. Raises RendezvousClosed.

        Waits for the server's thread: a host with more frames than the server can take is read more slowly.
        """
        if self._loop is None:
            self._loop, self._new_client = self._rendezvous.endpoint()
            self._rendezvous.expect([peer_name(self._host)])
        # A closed loop has closed its connections: the frame is dropped.
        while not self._loop.is_closed():
            if self._room.acquire(timeout=_LOOK):
                with suppress(RuntimeError):  # the loop was closed in this moment
                    self._loop.call_soon_threadsafe(loud(self._obey), header, body)
                return

    def close(self) -> None:
        """Close the connections: the host is gone with its workers."""
        if self._loop is not None:
            with suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(self._lose_all)

    def _obey(self, header: Mapping[str, Any], body: bytes) -> None:
        self._room.release()
        number, kind = header["id"], header["what"]
        if kind == "open":
            self._open(number)
            return
        transport = self._transports.get(number)
        if transport is None:
            return  # ended here, before the agent heard of it
        match kind:
            case "close":
                del self._transports[number]
                transport.lose()
            case "data":
                transport.arrive(body)
            case "end":
                transport.arrive_end()
            case "credit":
                transport.grow_credit(header["bytes"])

    def _open(self, number: int) -> None:
        client = self._new_client()

        def send(kind: str, body: bytes = b"", **fields: int) -> None:
            if kind == "close":
                del self._transports[number]
            self._send({"type": "relay", "id": number, "what": kind, **fields}, body)

        transport = self._transports[number] = _Transport(client, peer_name(self._host), send)
        client.connection_made(transport)

    def _lose_all(self) -> None:
        for transport in list(self._transports.values()):
            transport.lose()
        self._transports.clear()


class _Transport(asyncio.Transport):
    """A relayed connection as a transport for the server's protocol. For the event loop's thread alone.

    `send(kind, body, **fields)` sends a frame about this connection.
    """

    def __init__(self, client: asyncio.Protocol, peer: str, send: Callable[..., None]) -> None:
        super().__init__(extra={"peername": (peer, 0)})
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._send = send
        self._credit = WINDOW
        self._waiting = bytearray()
        self._choked = False
        self._end_follows = self._end_sent = False
        self._arrived = bytearray()
        self._end_arrived = False
        self._passed = 0
        self._paused = False
        self._closing = False
        self._over = False

    # Frames of the agent:

    def arrive(self, data: bytes) -> None:
        self._arrived += data
        self._deliver()

    def arrive_end(self) -> None:
        self._end_arrived = True
        self._deliver()

    def grow_credit(self, size: int) -> None:
        self._credit += size
        self._push()
        if self._choked and len(self._waiting) <= _MUCH // 4 and not self._over:
            self._choked = False
            self._client.resume_writing()

    def lose(self) -> None:
        """End without a frame to the agent: the worker has reset the connection, or the host is gone."""
        self._send = _nowhere
        self._finish(ConnectionResetError("the relayed connection was reset"))

    # Calls of the server's protocol, as asyncio.Transport defines:

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            # Not at once: the protocol calls this in the middle of handling earlier data.
            self._loop.call_soon(self._deliver)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._end_follows:
            return
        self._waiting += data
        self._push()
        if len(self._waiting) > _MUCH and not self._choked:
            self._choked = True
            self._client.pause_writing()

    def write_eof(self) -> None:
        if not self._end_follows:
            self._end_follows = True
            self._push()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._arrived.clear()
            self._push()

    def abort(self) -> None:
        self._finish(None)

    def _deliver(self) -> None:
        if self._paused or self._closing:
            return
        if self._arrived:
            data = bytes(self._arrived)
            self._arrived.clear()
            self._passed += len(data)
            if self._passed >= WINDOW // 4:
                self._send("credit", bytes=self._passed)
                self._passed = 0
            try:
                self._client.data_received(data)
            except Exception as error:  # noqa: BLE001 (a defect with one client must not end the others)
                self._finish(error)
                self._loop.call_exception_handler({"message": "a relayed client", "exception": error})
                return
        if self._end_arrived and not self._paused and not self._closing:
            self._end_arrived = False
            if not self._client.eof_received():
                self.close()

    def _push(self) -> None:
        """Send as much as the credit allows, then the end if it follows."""
        while self._waiting and self._credit > 0 and not self._over:
            data = bytes(self._waiting[: min(CHUNK, self._credit)])
            del self._waiting[: len(data)]
            self._credit -= len(data)
            self._send("data", data)
        if self._waiting or self._over:
            return
        if self._closing:
            self._finish(None)
        elif self._end_follows and not self._end_sent:
            self._end_sent = True
            self._send("end")

    def _finish(self, error: Exception | None) -> None:
        if self._over:
            return
        self._over = self._closing = True
        self._waiting.clear()
        self._arrived.clear()
        self._loop.call_soon(lambda: self._client.connection_lost(error))
        # Last: the receiver of this frame finds the connection gone.
        self._send("close")


def _nowhere(_kind: str, _body: bytes = b"", **_fields: int) -> None:
    pass
