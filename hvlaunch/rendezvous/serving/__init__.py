"""The rendezvous server in the driver: its port, a thread and an event loop."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hvlaunch.rendezvous import CannotListen, RendezvousClosed
from hvlaunch.rendezvous.serving.acceptors import RESERVED, ControlSockets, Shortage, answer_early
from hvlaunch.rendezvous.serving.store_record import Once, StoreFile, StoreRecord
from hvlaunch.rendezvous.serving.traffic import (
    Answerer,
    HttpLimits,
    Stats,
    Traffic,
    TrafficLimits,
    plain_address,
)
from hvlaunch.rendezvous.store import HorovodScopes, Store, StoreLimits

if TYPE_CHECKING:
    import asyncio
    import ssl
    from concurrent.futures import Future

    from hvlaunch.rendezvous.serving.acceptors import Acceptor
    from hvlaunch.rendezvous.serving.certificate import Certificate
    from hvlaunch.rendezvous.serving.http import Answer, ClientConnection, Head, Route
    from hvlaunch.rendezvous.serving.routes import Routes

__all__ = ["EVERYWHERE", "Calls", "Listeners", "RendezvousServer"]


T = TypeVar("T")

EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 (these are recognized, not chosen)
_BOTH_FAMILIES = ("", "::")
_BACKLOG = 1024
_PATIENCE = 2.0
"""Seconds for a killed process to release its port."""
_CLOSE_TIME = 0.5  # seconds for clients to take their last answers

# Names of notes, or their beginnings:
_PORT, _AT, _KNOWN, _HOROVOD, _ASKED = "port", "at ", "known ", "horovod", "asked"


class Listeners:
    """Sockets listening at the same port: the first at `host`, "" for every address. Port 0 is a free port.

    A free port is held at every address from the start: the server may listen at more of them later.
    Raises CannotListen.
    """

    def __init__(self, host: str, port: int) -> None:
        self._holder: socket.socket | None = None
        requested = port
        if port == 0 and host not in EVERYWHERE:
            # It holds the port at all addresses without listening: Linux lets sockets with
            # SO_REUSEADDR share a port with such a holder, so add() can listen there.
            self._holder = _bind("", 0)
            port = self._holder.getsockname()[1]
        try:
            first = _listener(host, port, requested)
        except BaseException:
            self.release_port()
            raise
        self.port: int = first.getsockname()[1]
        self.sockets = {host: first}

    def add(self, host: str) -> socket.socket | None:
        """Listen at another address; None if the server does so already. Raises CannotListen."""
        if host in self.sockets or any(everywhere in self.sockets for everywhere in EVERYWHERE):
            return None
        listener = self.sockets[host] = _listener(host, self.port, self.port)
        return listener

    def release_port(self) -> None:
        """Hold the port no longer at addresses without a listener."""
        if self._holder is not None:
            self._holder.close()

    def close(self) -> None:
        self.release_port()
        for listener in self.sockets.values():
            listener.close()


def _listen_again(host: str, port: int, others: Iterable[str], say: Callable[[str], None]) -> Listeners:
    """Listen like an earlier server of this user: at `host`, and at the other addresses still on this machine.

    The old process may still be ending: a port in use is tried again for a while. Raises CannotListen.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            listeners = Listeners(host, port)
            break
        except CannotListen as error:
            if not _is_in_use(error) or time.monotonic() >= deadline:
                raise
        # Polled: no event announces a released port.
        time.sleep(0.02)
    try:
        for other in others:
            try:
                listeners.add(other)
            except CannotListen as error:  # noqa: PERF203 (there are few)
                # An address that has left this machine is worth a warning. A port in use means
                # another server there.
                if _is_in_use(error):
                    raise
                say(f"warning: {error.cause}")
    except BaseException:
        listeners.close()
        raise
    return listeners


def _is_in_use(error: CannotListen) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE


def _listener(host: str, port: int, requested: int) -> socket.socket:
    """Raises CannotListen with the requested port."""
    try:
        listener = _bind(host, port)
        try:
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        # The system's own words if it has some: getaddrinfo's numbers are no errno.
        number = error.errno or 0
        cause = os.strerror(number) if number > 0 else error.strerror
        raise CannotListen(cause or str(error), host=host, port=requested) from error
    # Connections inherit it. asyncio alone would leave it unset: it looks for a protocol number that is 0 here.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _bind(host: str, port: int) -> socket.socket:
    """Bind for both families if host is "" or "::" and the kernel has IPv6, else to the host's first address."""
    family: int
    address: tuple[Any, ...]
    if host not in _BOTH_FAMILIES:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    elif socket.has_dualstack_ipv6():
        family, address = socket.AF_INET6, ("::", port)
    else:
        family, address = socket.AF_INET, ("", port)
    # Without SO_REUSEADDR, connections of an earlier server would block its port for a minute.
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Set either way: the default is a setting of the host (net.ipv6.bindv6only).
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in _BOTH_FAMILIES))
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class RendezvousServer:
    """Serves a job's store from start() until close(). All methods may be called from any thread.

    The server's thread sleeps without an event loop until the first client comes: many jobs have no client.

    `token` opens everything, to clients on this machine and to those with TLS, which get `certificate`. `answerer` proves the
    server's identity to agents without revealing the token. Host "" is every address of this machine; port 0 is a free port,
    then in `port`. `say` writes to the user of this process. `file` keeps the store's content on disk; if an earlier server
    used it, this server continues with the same content at the same port and addresses.
    """

    def __init__(
        self,
        token: str,
        *,
        certificate: Certificate | None = None,
        answerer: Answerer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        store_limits: StoreLimits | None = None,
        http_limits: HttpLimits | None = None,
        traffic_limits: TrafficLimits | None = None,
        file: StoreFile | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.port = port
        self._token = token
        self._certificate = certificate
        self._context: ssl.SSLContext | None = None
        self._answerer = answerer
        self._host = host
        # Versions begin with the clock: those of a replacement without a file are later, too.
        self._store = Store(store_limits, version=time.time_ns() // 1000)
        self._once = Once()
        self._record = StoreRecord(file, self._store, self._once, say, self._count_fault)
        self._say = say
        self._traffic: Traffic[ClientConnection] = Traffic(traffic_limits)
        self._horovod = HorovodScopes()
        self._shortage = Shortage(say)
        self._reserved: list[int] = []
        self._http_limits = http_limits
        self._faults = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._new_client: Callable[[], asyncio.Protocol]
        self._new_transport: Callable[[], asyncio.Protocol]
        self._control = ControlSockets()
        self._was_asked = False
        self._acceptors: list[Acceptor] = []
        self._thread: threading.Thread | None = None
        self._wakeup: tuple[int, int] | None = None
        self._listeners: Listeners
        self._is_needed = False
        self._closing = False
        self._awake = threading.Event()
        # Results wait for the disk like clients' answers.
        self._calls = Calls(self._store, self._record.then)

    def __enter__(self) -> RendezvousServer:  # noqa: PYI034 (typing.Self came with Python 3.11)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Listen, and serve in a new thread.

        Raises CannotListen, BadStoreFile.
        """
        self._record.begin()
        notes = self._record.notes
        if _PORT in notes:
            self._listeners = _listen_again(self._host, int(notes[_PORT]), _noted(notes, _AT), self._say)
        else:
            self._listeners = Listeners(self._host, self.port)
        self._take_up(notes)
        self.port = self._listeners.port
        # On disk before the first client comes: a successor must listen at the same port.
        self._record.note(_PORT, b"%d" % self.port)
        self._record.flush()
        # A pipe wakes the thread while there is no event loop.
        self._wakeup = os.pipe()
        self._reserved = [os.dup(self._wakeup[0]) for _ in range(RESERVED)]
        self._thread = threading.Thread(
            target=self._run, args=(self._wakeup[0],), name="hvlaunch-rendezvous", daemon=True
        )
        self._thread.start()

    def listen_at(self, host: str) -> None:
        """Serve clients at another address, too. Raises CannotListen, RendezvousClosed."""
        with self._lock:
            if self._closing or self._thread is None:
                raise RendezvousClosed("the rendezvous is not running")
            listener = self._listeners.add(host)
            # The server listens there already.
            if listener is None:
                return
            if self._loop is not None:
                # With a loop, acceptors and the record belong to its thread.
                self._loop.call_soon_threadsafe(self._accept_at, listener)
                self._loop.call_soon_threadsafe(self._record.note, f"{_AT}{host}")
            else:
                self._record.note(f"{_AT}{host}")
                self._record.flush()
                self._wake()

    def serve_beside(self, listener: socket.socket, admit: Callable[[Head], Answer | Route]) -> None:
        """Serve programs of this user at a Unix socket, which is closed with the server: the job's control.

        `admit` decides on each request, as RequestReader says. Raises RendezvousClosed.
        """
        with self._lock:
            if self._closing or self._thread is None:
                raise RendezvousClosed("the rendezvous is not running")
            self._control.add(listener, admit)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._accept_beside, listener)
            else:
                self._wake()

    def close(self) -> None:
        """End the thread and each connection; waiting clients get an error. May be repeated."""
        with self._lock:
            self._closing = True
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._stop.set)
            self._wake()
        # Not under the lock: the ending thread takes it too.
        if self._thread is not None:
            self._thread.join()
        # Under the lock: _wake() must not write to a closed descriptor, which may be another file's
        # by then.
        with self._lock:
            pipe, self._wakeup = self._wakeup, None
            for fd in pipe or ():
                os.close(fd)

    def _wake(self) -> None:
        if self._wakeup is not None:
            os.write(self._wakeup[1], b"!")

    # The driver's own access to the store:

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Set the key like a client. Raises ValueTooLarge, StoreFull, RendezvousClosed."""
        self._call(lambda: self._store.put(scope, key, value))

    def get(self, scope: str, key: str) -> bytes | None:
        """Return the value, or None. Raises RendezvousClosed."""
        return self._call(lambda: self._store.get(scope, key))

    def delete(self, scope: str, key: str) -> bool:
        """Delete the key; False if it was not set. Raises RendezvousClosed."""
        return self._call(lambda: self._store.delete(scope, key))

    def delete_scope(self, scope: str) -> None:
        """Delete the scope's keys. Raises RendezvousClosed."""
        self._call(lambda: self._store.delete_scope(scope))

    def keys(self, scope: str) -> list[str]:
        """Return the scope's keys, sorted. Raises RendezvousClosed."""
        return self._call(lambda: self._store.keys_of(scope))

    def subscribe(
        self, scope: str, call: Callable[[str, bytes | None, int], None], *, since: int | None = None
    ) -> Callable[[], None]:
        """Call `call(key, value, version)` after each change in the scope is on disk; the value of a deletion is None.

        Calls come in the thread of the change, for a client's the server's: `call` must neither block nor use the server. With
        `since`, it is first called for the latest change of each key after that version. Returns a function to unsubscribe.
        Raises RendezvousClosed.
        """

        def notify(key: str, value: bytes | None, version: int) -> None:
            self._record.then(lambda: call(key, value, version))

        def begin() -> Callable[[], None]:
            # Both in one call: no change slips between the news and the subscription.
            for news in () if since is None else self._store.news(scope, since):
                notify(*news)
            return self._store.subscribe(scope, notify)

        call_off = self._call(begin)

        def end() -> None:
            with suppress(RendezvousClosed):
                self._call(call_off)

        return end

    def expect(self, addresses: Iterable[str]) -> None:
        """Trust the addresses of the job's hosts: clients from elsewhere can't take the places of their workers.

        Raises RendezvousClosed.
        """
        trusted = list(addresses)

        def trust() -> None:
            self._traffic.unauthenticated.know(trusted)
            for address in trusted:
                self._record.note(f"{_KNOWN}{address}")

        self._call(trust)

    def open_to_horovod(self, sizes: Mapping[str, int], addresses: Iterable[str], number: int) -> None:
        """Open these scopes to clients at the addresses without a token, and close and delete those of another round.

        See HorovodScopes. Raises RendezvousClosed.
        """

        def change() -> None:
            if self._horovod.round != number:
                # Twice: first the scopes of the earlier round, then earlier content of the new ones.
                self._horovod.clear(self._store)
                self._horovod.open(sizes, addresses, number)
                self._horovod.clear(self._store)
                self._record.note(_HOROVOD, self._horovod.describe())

        self._call(change)

    def wait(self, scope: str, key: str, timeout: float) -> bytes | None:
        """Wait for a value and return it; None after `timeout` seconds.

        Raises RendezvousClosed, also if the server is closed meanwhile.
        """
        from concurrent.futures import Future  # noqa: PLC0415 (see the top)
        from concurrent.futures import TimeoutError as WaitOver  # noqa: PLC0415 (see the top)

        result: Future[bytes] = Future()
        call_off = self._call(lambda: self._calls.begin_wait(scope, key, result))
        try:
            return result.result(timeout)
        except WaitOver:
            # The value may have come between the timeout and the cancellation.
            self._call(call_off)
            return result.result() if result.done() else None

    @property
    def was_asked(self) -> bool:
        """True if a client ever connected to the rendezvous, authenticated or not."""
        return self._was_asked

    @property
    def is_kept(self) -> bool:
        """True if another server could continue from the file now."""
        return self._record.is_kept

    @property
    def version(self) -> int:
        """The version of the latest change. Raises RendezvousClosed."""
        return self._call(lambda: self._store.version)

    def stats(self) -> Stats:
        """Return the server's numbers. Raises RendezvousClosed."""
        return self._call(self._count)

    def endpoint(self) -> tuple[asyncio.AbstractEventLoop, Callable[[], asyncio.Protocol]]:
        """Return the event loop and a maker of protocols, for clients without a socket of their own.

        Raises RendezvousClosed.
        """
        import asyncio  # noqa: PLC0415 (see the top)

        if self._thread is not None and not self._awake.is_set():
            with self._lock:
                self._is_needed = True
                self._wake()
            self._awake.wait()
        return self._call(lambda: (asyncio.get_running_loop(), self._new_client))

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` in the server's thread and return its result; before there is a loop, in this thread."""
        # close() stops the loop under this lock: work sent before is still done.
        with self._lock:
            if self._closing or self._thread is None:
                raise RendezvousClosed("the rendezvous is not running")
            if self._loop is None:
                try:
                    return work()
                finally:
                    self._record.flush()
            result = self._calls.send(self._loop, work)
        return result.result()

    def _count(self) -> Stats:
        return self._traffic.count(self._store, self._faults)

    def _take_up(self, notes: Mapping[str, bytes]) -> None:
        """Load the notes of an earlier server."""
        self._was_asked = _ASKED in notes
        self._traffic.unauthenticated.know(_noted(notes, _KNOWN))
        if _HOROVOD in notes:
            self._horovod.restore(notes[_HOROVOD])

    # Called in the server's thread:

    def _note_asked(self) -> None:
        if not self._was_asked:
            self._was_asked = True
            self._record.note(_ASKED)

    def _run(self, wakeup: int) -> None:
        try:
            callers = answer_early(
                lambda: list(self._listeners.sockets.values()),
                lambda: self._control.sockets,
                wakeup,
                lambda: self._closing or self._is_needed,
                self._answerer,
                self._shortage.relieve,
            )
            # The event loop needs descriptors of its own, and clients may hold all others.
            self._release_reserved()
            if self._closing:
                for caller in callers:
                    caller.close()
            else:
                self._run_loop(callers)
        finally:
            self._release_reserved()
            # Later calls get an error instead of waiting for a loop that has ended.
            with self._lock:
                self._closing, self._loop = True, None
            self._record.close()
            self._listeners.close()
            self._control.close()
            # endpoint() must not wait for a loop that never comes.
            self._awake.set()
            # Last: a call between the loop's end and this point waits for an answer.
            self._calls.end()

    def _release_reserved(self) -> None:
        reserved, self._reserved = self._reserved, []
        for fd in reserved:
            os.close(fd)

    def _make_room(self) -> bool:
        """Free a file descriptor for another client: raise the limit, or drop an unauthenticated client."""
        return self._shortage.relieve() or self._traffic.turn_out_oldest()

    def _run_loop(self, callers: list[socket.socket]) -> None:
        loop = _new_loop()
        try:
            # The default handler would print a traceback to the job's console.
            loop.set_exception_handler(self._on_fault)
            loop.run_until_complete(self._serve(callers))
        finally:
            loop.close()

    async def _serve(self, callers: list[socket.socket]) -> None:
        import asyncio  # noqa: PLC0415 (see the top)

        from hvlaunch.rendezvous.serving.http import (  # noqa: PLC0415 (see the top)
            Answer,
            ClientConnection,
            ClientTransport,
        )

        routes = self._routes()
        limits = self._http_limits or HttpLimits(body=self._store.limits.value)

        def new_client() -> ClientConnection:
            self._note_asked()
            return ClientConnection(routes, limits, self._traffic, self._record)

        self._new_client = new_client

        def connect(is_private: Callable[[], bool]) -> ClientConnection:
            self._note_asked()
            return ClientConnection(routes, limits, self._traffic, self._record, is_private)

        context = None if self._certificate is None else self._tls_context
        self._new_transport = lambda: ClientTransport(connect, context, self._answerer)
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # From here on, only this thread touches the store.
        with self._lock:
            if self._closing:
                return
            self._loop = loop
            self._record.serve_in(loop.call_soon)
            listeners = list(self._listeners.sockets.values())
            control_sockets = self._control.sockets
        for listener in listeners:
            self._accept_at(listener)
        for control_socket in control_sockets:
            self._accept_beside(control_socket)
        for caller in callers:
            with suppress(OSError):
                await loop.connect_accepted_socket(self._new_transport, caller)
        self._awake.set()
        await self._stop.wait()
        for acceptor in self._acceptors:
            acceptor.close()
        # This releases answers held for the disk.
        self._record.flush()
        # A client cut off without an answer would retry; 503 tells it to stop.
        connections = [*self._traffic.open, *self._control.connections]
        for connection in connections:
            connection.close(Answer(503, b"the rendezvous has ended\n"))
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=_CLOSE_TIME)
        if stuck := [*self._traffic.open, *self._control.connections]:
            for connection in stuck:
                connection.abort()
            await asyncio.wait([connection.lost for connection in stuck])

    def _accept_at(self, listener: socket.socket) -> None:
        from hvlaunch.rendezvous.serving.acceptors import Acceptor  # noqa: PLC0415 (see the top)

        def is_welcome(_sock: socket.socket, name: object) -> bool:
            return self._traffic.is_welcome(plain_address(name))

        self._acceptors.append(Acceptor(listener, self._new_transport, is_welcome, self._make_room))

    def _accept_beside(self, listener: socket.socket) -> None:
        self._acceptors.append(self._control.open(listener, self._make_room))

    def _tls_context(self) -> ssl.SSLContext:
        if self._context is None and self._certificate is not None:
            from hvlaunch.rendezvous.serving.certificate import tls_context  # noqa: PLC0415 (see the top)

            self._context = tls_context(self._certificate)
        assert self._context is not None  # noqa: S101 (for the type checker: called only with a certificate)
        return self._context

    def _routes(self) -> Routes:
        from hvlaunch.rendezvous.serving.routes import Routes, health, prometheus  # noqa: PLC0415 (see the top)

        return Routes(
            self._store,
            token=self._token,
            once=self._once,
            horovod=self._horovod,
            about={
                "health": lambda: health(self._count()),
                "metrics": lambda: prometheus(self._count(), self._traffic.answers),
            },
        )

    def _on_fault(self, _loop: asyncio.AbstractEventLoop, _context: dict[str, object]) -> None:
        """Count an exception of the event loop, which closes the connection. The console belongs to the driver."""
        self._count_fault()

    def _count_fault(self) -> None:
        self._faults += 1


def _noted(notes: Mapping[str, bytes], kind: str) -> list[str]:
    """Return the parts of notes' names behind `kind`."""
    return [name[len(kind) :] for name in notes if name.startswith(kind)]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 (see the top)
    except ImportError:
        import asyncio  # noqa: PLC0415 (see the top)

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Calls:
    """Calls from the driver's threads into the server's thread, and their results.

    `then(act)` runs `act` when all changes are on disk, so no result is published too early.
    """

    def __init__(self, store: Store, then: Callable[[Callable[[], None]], None]) -> None:
        self._store = store
        self._then = then
        self._open: set[Future[Any]] = set()

    def send(self, loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> Future[T]:
        """Let the loop's thread do the work; from any thread."""
        from concurrent.futures import Future  # noqa: PLC0415 (see the top)

        result: Future[T] = Future()
        self._open.add(result)
        result.add_done_callback(self._open.discard)
        loop.call_soon_threadsafe(self._settle, result, work)
        return result

    def begin_wait(self, scope: str, key: str, result: Future[bytes]) -> Callable[[], None]:
        """Set the result as soon as the key has a value; returns a function to cancel. In the server's thread."""
        value = self._store.get(scope, key)
        if value is not None:
            result.set_result(value)
            return lambda: None
        self._open.add(result)
        result.add_done_callback(self._open.discard)
        call_off = self._store.when_set(
            scope, key, lambda value: self._then(lambda: result.set_result(value))
        )

        def end() -> None:
            call_off()
            self._open.discard(result)

        return end

    def end(self) -> None:
        """Let waiting callers get RendezvousClosed."""
        for result in list(self._open):
            if not result.done():
                result.set_exception(RendezvousClosed("the rendezvous has ended"))

    def _settle(self, result: Future[T], work: Callable[[], T]) -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
            result.set_exception(error)
        else:
            self._then(lambda: result.set_result(value))
