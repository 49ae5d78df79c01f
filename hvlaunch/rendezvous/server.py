"""The rendezvous server in the driver: one thread, one event loop, one port for IPv4 and IPv6."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from hvlaunch.rendezvous.errors import RendezvousClosed, RendezvousError
from hvlaunch.rendezvous.store import Store, StoreLimits

if (
    TYPE_CHECKING
):  # asyncio and the parser cost most of the start: a job pays for them when it starts a server
    import asyncio
    from concurrent.futures import Future

    from hvlaunch.rendezvous.connection import Traffic
    from hvlaunch.rendezvous.http import HttpLimits

__all__ = ["RendezvousServer", "Stats"]

T = TypeVar("T")

_BACKLOG = 1024
_CLOSE_TIME = 0.5  # seconds for last answers to be taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A server's numbers at one moment."""

    connections: int
    """Open now."""
    requests: int
    """Answered, whatever the answer."""
    unauthorized: int
    """Of these, answered with 401."""
    refused: int
    """Of these, malformed, not allowed or over a limit."""
    dropped: int
    """Connections ended because the client was too slow, idle, or took no answers."""
    faults: int
    """Exceptions that nobody caught; each is a fault of the server."""
    keys: int
    size: int
    """Bytes held, names included."""
    waiting: int
    """Long polls, and waits of the driver, not yet answered."""


class RendezvousServer:
    """Serves one job's store from start() until close(); all methods may be called from any thread.

    It sleeps, without the event loop, until the first client or call comes: many a job needs neither.

    token opens everything, probe_token only `/-/nonce`, which tells `nonce`: who got these two from the
    driver can find out whether an address leads to this server, without showing the token to a stranger.
    host "" is every address of this machine; port 0 is a free one, told by `port`.
    """

    def __init__(
        self,
        token: str,
        probe_token: str,
        nonce: str,
        *,
        host: str = "",
        port: int = 0,
        store_limits: StoreLimits | None = None,
        http_limits: HttpLimits | None = None,
    ) -> None:
        self.port = port
        self._secrets = {"token": token, "probe_token": probe_token, "nonce": nonce}
        self._host = host
        self._store = Store(store_limits)
        self._http_limits = http_limits
        self._faults = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._traffic: Traffic
        self._thread: threading.Thread | None = None
        self._bell: tuple[int, int] | None = None
        self._closing = False
        self._awake = threading.Event()
        self._waits: set[Future[bytes]] = set()

    def __enter__(self) -> RendezvousServer:  # noqa: PYI034 (typing.Self came with Python 3.11)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listen, and serve in a thread of its own.

        Raises RendezvousError where the port can't be had.
        """
        listener = _listen(self._host, self.port)
        self.port = listener.getsockname()[1]
        self._bell = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(listener, self._bell[0]), name="hvlaunch-rendezvous", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection; who still waits is told. May be repeated."""
        with self._lock:
            self._closing = True
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._stop.set)
            self._ring()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            bell, self._bell = self._bell, None
            for fd in bell or ():
                os.close(fd)

    def _ring(self) -> None:
        if self._bell is not None:
            os.write(self._bell[1], b"!")

    # The driver's own way to the store:

    def put(self, scope: str, key: str, value: bytes) -> None:
        """As a client's PUT. Raises ValueTooLarge, StoreFull, RendezvousClosed."""
        self._call(lambda: self._store.put(scope, key, value))

    def get(self, scope: str, key: str) -> bytes | None:
        """The value, or None. Raises RendezvousClosed."""
        return self._call(lambda: self._store.get(scope, key))

    def delete(self, scope: str, key: str) -> None:
        """Forget the key, if it is set. Raises RendezvousClosed."""
        self._call(lambda: self._store.delete(scope, key))

    def wait(self, scope: str, key: str, timeout: float) -> bytes | None:
        """The value as soon as there is one; None after `timeout` seconds without.

        Raises RendezvousClosed, also when the server is closed meanwhile.
        """
        from concurrent.futures import Future  # noqa: PLC0415 (see the top)
        from concurrent.futures import TimeoutError as WaitOver  # noqa: PLC0415 (see the top)

        found: Future[bytes] = Future()
        call_off = self._call(lambda: self._begin_wait(scope, key, found))
        try:
            return found.result(timeout)
        except WaitOver:
            self._call(call_off)
            return found.result() if found.done() else None

    def stats(self) -> Stats:
        """The server's numbers now. Raises RendezvousClosed."""
        return self._call(self._count)

    def _begin_wait(self, scope: str, key: str, found: Future[bytes]) -> Callable[[], None]:
        value = self._store.get(scope, key)
        if value is not None:
            found.set_result(value)
            return lambda: None
        self._waits.add(found)
        found.add_done_callback(self._waits.discard)
        call_off = self._store.when_set(scope, key, found.set_result)

        def end() -> None:
            call_off()
            self._waits.discard(found)

        return end

    def _call(self, work: Callable[[], T]) -> T:
        """Do it in the server's thread, and wait for that."""
        from concurrent.futures import Future  # noqa: PLC0415 (see the top)

        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
                result.set_exception(error)

        if self._thread is not None and not self._awake.is_set():
            with self._lock:
                self._ring()
            self._awake.wait()
        with self._lock:  # close() sends its last word under it, so what is sent before is still done
            if self._loop is None:
                raise RendezvousClosed("the rendezvous is not running")
            self._loop.call_soon_threadsafe(run)
        return result.result()

    def _count(self) -> Stats:
        answers = self._traffic.answers
        return Stats(
            connections=len(self._traffic.open),
            requests=answers.total(),
            unauthorized=answers[401],
            refused=sum(count for status, count in answers.items() if status not in (200, 401, 404)),
            dropped=self._traffic.dropped,
            faults=self._faults,
            keys=self._store.keys,
            size=self._store.size,
            waiting=self._store.waiting,
        )

    # The server's thread:

    def _run(self, listener: socket.socket, bell: int) -> None:
        try:
            first = select.poll()
            for source in (listener.fileno(), bell):
                first.register(source, select.POLLIN)
            first.poll()
            if not self._closing:
                self._run_loop(listener)
        finally:
            listener.close()
            self._awake.set()

    def _run_loop(self, listener: socket.socket) -> None:
        loop = _new_loop()
        try:
            loop.set_exception_handler(self._on_fault)
            loop.run_until_complete(self._serve(listener))
        finally:
            loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        import asyncio  # noqa: PLC0415 (see the top)

        from hvlaunch.rendezvous.connection import ClientConnection, Traffic  # noqa: PLC0415 (see the top)
        from hvlaunch.rendezvous.http import Answer, HttpLimits  # noqa: PLC0415 (see the top)
        from hvlaunch.rendezvous.routes import Routes  # noqa: PLC0415 (see the top)

        routes = Routes(self._store, **self._secrets)
        limits = self._http_limits or HttpLimits(body=self._store.limits.value)
        self._traffic = Traffic()
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        acceptor = await loop.create_server(
            lambda: ClientConnection(routes, limits, self._traffic), sock=listener, backlog=_BACKLOG
        )
        with self._lock:
            if self._closing:
                self._stop.set()
            else:
                self._loop = loop
        self._awake.set()
        await self._stop.wait()
        acceptor.close()
        for found in list(self._waits):
            found.set_exception(RendezvousClosed("the rendezvous has ended"))
        connections = list(self._traffic.open)
        for connection in connections:
            connection.close(Answer(503, b"the rendezvous has ended\n"))
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=_CLOSE_TIME)
        if self._traffic.open:
            stuck = list(self._traffic.open)
            for connection in stuck:
                connection.abort()
            await asyncio.wait([connection.lost for connection in stuck])

    def _on_fault(self, _loop: asyncio.AbstractEventLoop, _context: dict[str, object]) -> None:
        """The event loop closes the connection; the others go on, and the console is not ours."""
        self._faults += 1


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 (see the top)
    except ImportError:
        import asyncio  # noqa: PLC0415 (see the top)

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _listen(host: str, port: int) -> socket.socket:
    """One socket: for both families where host is "" and the kernel has IPv6, else for the host's first address."""
    try:
        if host:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address, family=family)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
    except OSError as error:
        where = f"{host or 'all addresses'} port {port}"
        cause = f"the rendezvous can't listen on {where}: {error.strerror or error}"
        raise RendezvousError(cause, hint="another port") from error
    # Connections inherit it. asyncio alone would leave it unset: it looks for a protocol number that is 0 here.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
