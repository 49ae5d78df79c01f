"""The driver's end of relayed connections: clients of the rendezvous whose bytes come in frames, not by a socket.

agent/relay.py has the other end, and describes the frames.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from hvlaunch.agent.wire.frames import RELAY_CHUNK as CHUNK
from hvlaunch.agent.wire.frames import RELAY_WINDOW as WINDOW
from hvlaunch.driver.process_events import loud

__all__ = ["HostRelay", "Rendezvous", "peer_name"]

_MUCH = 1 << 16  # bytes that wait for credit, beyond which the server is asked to write no more
_MOST_UNSERVED = 64  # frames of a host that wait for the server's thread, after which its others wait, too
_LOOK = 1.0  # seconds between looks whether the server is still there

Send = Callable[[Mapping[str, Any], bytes], None]


class Rendezvous(Protocol):
    """What a relay needs of the server."""

    def endpoint(self) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]: ...
    def expect(self, addresses: Iterable[str]) -> None: ...


def peer_name(host: str) -> str:
    """What the rendezvous knows relayed clients of a host by, where others have their address (without a zone)."""
    return f"relay:{host.partition('%')[0]}"


class HostRelay:
    """Connections of one host's workers to `rendezvous`. `send` takes frames for the host, and never blocks.

    obey() and close() are for the host's own thread. All else happens in the rendezvous' thread, whose event
    loop is not loaded before the first worker comes.
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

        It waits as long as the server's thread is behind: a host where connections come and go faster than they are
        served is read from more slowly.
        """
        if self._loop is None:
            self._loop, self._new_client = self._rendezvous.endpoint()
            self._rendezvous.expect([peer_name(self._host)])
        while not self._loop.is_closed():  # else no connection is left
            if self._room.acquire(timeout=_LOOK):
                with suppress(RuntimeError):  # it has just been closed
                    self._loop.call_soon_threadsafe(loud(self._obey), header, body)
                return

    def close(self) -> None:
        """The host is gone, and its workers with it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # as above
                self._loop.call_soon_threadsafe(self._lose_all)

    def _obey(self, header: Mapping[str, Any], body: bytes) -> None:
        self._room.release()
        number, what = header["id"], header["what"]
        if what == "open":
            self._open(number)
            return
        transport = self._transports.get(number)
        if transport is None:
            return  # it has ended here, and the agent does not know yet
        match what:
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

        def send(what: str, body: bytes = b"", **more: int) -> None:
            if what == "close":
                del self._transports[number]
            self._send({"type": "relay", "id": number, "what": what, **more}, body)

        transport = self._transports[number] = _Transport(client, peer_name(self._host), send)
        client.connection_made(transport)

    def _lose_all(self) -> None:
        for transport in list(self._transports.values()):
            transport.lose()
        self._transports.clear()


class _Transport(asyncio.Transport):
    """One relayed connection, as the server's protocol sees it. For the event loop's thread alone.

    `send(what, body, **more)` sends a frame about it.
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

    # What the agent sends:

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
        """The worker has reset the connection, or its host is gone: there is nobody to tell."""
        self._send = _nowhere
        self._finish(ConnectionResetError("the relayed connection was reset"))

    # What the server's protocol calls, as asyncio.Transport has it:

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver)  # not at once: the client is in the middle of something

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
            except Exception as error:  # noqa: BLE001 (what a client sends is as bad for no other)
                self._finish(error)
                self._loop.call_exception_handler({"message": "a relayed client", "exception": error})
                return
        if self._end_arrived and not self._paused and not self._closing:
            self._end_arrived = False
            if not self._client.eof_received():
                self.close()

    def _push(self) -> None:
        """Send what there is credit for, then what comes behind it."""
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
        self._send("close")  # whoever hears of it finds the connection gone


def _nowhere(_what: str, _body: bytes = b"", **_more: int) -> None:
    pass
