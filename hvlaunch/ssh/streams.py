"""Byte streams to hosts, below SSH: TCP, a ProxyCommand's stdio, and a borrowed descriptor.

ConnectLimit bounds the simultaneous handshakes, and EarlyStarts dials before the job asks for its connections.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import random as any_random
from typing import Any, Protocol, TypeVar

from hvlaunch.errors import ConnectFailed, HostError, SentAway, StartTimeout, UnknownHost
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.ssh import Tail, stage
from hvlaunch.ssh.config import HostSettings

__all__ = [
    "ConnectLimit",
    "Dialed",
    "Early",
    "EarlyStarts",
    "GreetingSocket",
    "ProxySocket",
    "QuickSocket",
    "Stream",
    "addresses_toward",
    "borrow",
    "dial",
    "dial_early",
    "greeting_with",
    "is_near",
    "persist",
    "silence",
    "start_proxy",
    "was_reset",
]


_GREETING_SIZE = 256


class Stream(Protocol):
    """The part of a socket's interface that SSH needs."""

    greeting: bytes
    """The first received bytes: they identify the other side."""

    @property
    def local_address(self) -> str:
        """The local address, as the first machine on the way sees it; empty if unknown."""

    @property
    def remote_address(self) -> str:
        """The host's address; empty if unknown."""

    @property
    def is_near(self) -> bool:
        """See Connection."""

    def silence(self) -> float | None:
        """See Connection."""

    def recv(self, size: int, /) -> bytes: ...

    def send(self, data: bytes, /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...

    def problem(self) -> str | None:
        """Return the error of the transport, as reported there, after the stream has ended."""


def greeting_with(greeting: bytes, data: bytes) -> bytes:
    """Append data to the greeting while it is short."""
    return greeting if len(greeting) >= _GREETING_SIZE else greeting + data[:_GREETING_SIZE]


class GreetingSocket(socket.socket):
    """A socket that keeps the greeting."""

    greeting = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self.greeting = greeting_with(self.greeting, data)
        return data

    def problem(self) -> str | None:
        return None


_END_PATIENCE = 1.0
_STDERR_PATIENCE = 1.0
_STDERR_SIZE = 16 * 1024


class ProxySocket(GreetingSocket):
    """The near end of the pipe to the ProxyCommand `process`; close() ends the process."""

    local_address = remote_address = ""
    is_near = False

    def __init__(self, near: socket.socket, process: "subprocess.Popen[bytes]", command: str) -> None:
        super().__init__(fileno=near.detach())
        self._process = process
        self._command = command
        self._tail = Tail()
        self._drain = threading.Thread(target=self._drain_stderr, name="ProxyCommand stderr", daemon=True)
        self._drain.start()

    def silence(self) -> None:
        return None

    def problem(self) -> str | None:
        # The message may still be on its way through the pipe.
        self._drain.join(_STDERR_PATIENCE)
        complaint = self._tail.get().decode("utf-8", "replace").strip().rpartition("\n")[2]
        status = self._process.poll()
        if status == 0 and not complaint:
            # The command succeeded: the host's sshd ended the connection.
            return None
        ended = "" if status is None else f" ended with status {status}"
        return f"its ProxyCommand `{self._command}`{ended}" + (f": {complaint}" if complaint else "")

    def close(self) -> None:
        super().close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_PATIENCE)

    def _drain_stderr(self) -> None:
        stderr = self._process.stderr
        if stderr is None:
            return
        with stderr:
            while data := os.read(stderr.fileno(), _STDERR_SIZE):
                self._tail.add(data)
        # Reap the process here, even if close() is never called.
        self._process.wait()


def start_proxy(host: str, command: str) -> ProxySocket:
    """Start `command` by /bin/sh. `host` is for messages. Raises ConnectFailed."""
    # A socket pair instead of two pipes: paramiko needs one object that can time out and be shut down.
    near, far = socket.socketpair()
    try:
        # A separate session: Ctrl-C in the terminal goes to the driver alone, and killpg() ends the whole command.
        process = subprocess.Popen(
            # exec: the process that is killed later is the command itself, not a shell above it.
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=far.fileno(),
            stdout=far.fileno(),
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        near.close()
        hint = f"`ssh -G {host}` shows it"
        raise ConnectFailed(f"its ProxyCommand can't be started: {error}", host=host, hint=hint) from None
    finally:
        far.close()
    return ProxySocket(near, process, command)


_PIDFD_GETFD = 438


def borrow(pid: int) -> socket.socket | None:
    """Duplicate the TCP socket of another process. The caller must close it, or the connection outlives the process.

    Returns None if the process has no TCP socket (with a ProxyCommand), if the kernel lacks the call (before
    Linux 5.6), or if it forbids the call (kernel.yama.ptrace_scope above 1).
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if str(entry.readlink()).startswith("socket:"):
                    duplicate = socket.socket(fileno=_get(process, int(entry.name)))
                    if duplicate.proto == socket.IPPROTO_TCP:
                        return duplicate
                    duplicate.close()
        finally:
            os.close(process)
    return None


def _get(process: int, number: int) -> int:
    import ctypes  # noqa: PLC0415 (1 ms before any connection; paramiko needs none of it)

    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd


_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Available on Linux."""
_FIRST_SIZE, _READ_SIZE = 1 << 14, 1 << 18
"""Bytes of a read: few for a login's small packets, since Python takes memory for all of them, and many once they come."""
_MIN_RTT = struct.Struct("=148xI")
"""Linux' struct tcp_info up to tcpi_min_rtt: the shortest round trip in microseconds."""
_NEAR = 2000
_STATE, _CLOSED = struct.Struct("B"), 7
"""The first field of the same struct, and the value TCP_CLOSE."""
_LAST_ACK_RECV = struct.Struct("=56xI")
"""The same struct up to tcpi_last_ack_recv, in milliseconds."""
_RTO_MAX_MS = 44
"""Since Linux 6.15."""
_LONGEST_PAUSE = 1000
_USER_TIMEOUT = 900_000
"""Linux' own limit with its default pauses between retransmissions."""
_FRESH = 5.0
"""Seconds for which an early connection may wait: sshd ends one without a login, and a snapshot of a tree can take minutes."""
_Addresses = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]
"""An answer of getaddrinfo."""


class QuickSocket(GreetingSocket):
    """A TCP socket that sends and acknowledges at once.

    Small packets in both directions, as in an SSH handshake, would wait for Nagle's algorithm here and for the
    peer's delayed ACK. The kernel forgets TCP_QUICKACK, so it is set after each read. paramiko reads each
    packet in two parts, so recv() reads ahead; only one thread may read.
    """

    _ahead = memoryview(b"")
    _size = _FIRST_SIZE

    @property
    def local_address(self) -> str:
        return str(self.getsockname()[0])

    @property
    def remote_address(self) -> str:
        return str(self.getpeername()[0])

    @property
    def is_near(self) -> bool:
        return is_near(self)

    def silence(self) -> float | None:
        return silence(self)

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if not self._ahead:
            self._ahead = memoryview(super().recv(self._size, flags))
            if len(self._ahead) == self._size:
                self._size = _READ_SIZE
            if _QUICKACK is not None:
                # The socket may have been closed meanwhile; the next call reports it.
                with contextlib.suppress(OSError):
                    self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        data, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        return data


class Dialed(NamedTuple):
    """A connection to the first of a host's addresses, perhaps not open yet."""

    addresses: _Addresses
    sock: QuickSocket
    until: float
    """Not used after this time."""


def dial_early(settings: HostSettings) -> Dialed | None:
    """Begin a connection for dial(), which waits for it; None behind a proxy or a jump host. Raises OSError, UnicodeError.

    Only the lookup of the name may block.
    """
    if settings.proxy_command is not None or settings.proxy_jump is not None:
        return None
    addresses = socket.getaddrinfo(
        settings.hostname, settings.port, settings.address_family, socket.SOCK_STREAM
    )
    family, _, protocol, _, address = addresses[0]
    sock = QuickSocket(family, socket.SOCK_STREAM, protocol)
    sock.setblocking(False)
    # An error now is found again by dial().
    sock.connect_ex(address)
    return Dialed(addresses, sock, time.monotonic() + _FRESH)


def dial(host: str, settings: HostSettings, deadline: float, dialed: Dialed | None = None) -> QuickSocket:
    """Connect to the host's addresses in the order of getaddrinfo; the first answer wins.

    `host` is for messages, and `deadline` is in time.monotonic(). A silent address gets an equal share of the
    remaining time. The resolver's own limits bound the lookup. `dialed` is used or closed. Raises UnknownHost,
    ConnectFailed, StartTimeout.
    """
    if dialed is not None and time.monotonic() >= dialed.until:
        dialed.sock.close()
        dialed = None
    name, port = settings.hostname, settings.port
    stage("resolve")
    addresses: _Addresses
    try:
        addresses = (
            socket.getaddrinfo(name, port, settings.address_family, socket.SOCK_STREAM)
            if dialed is None
            else dialed.addresses
        )
    except (OSError, UnicodeError) as error:
        cause = f"the name {name} can't be resolved to an address: {_reason(error)}"
        hint = (
            "check the spelling, or give its address as HostName in ~/.ssh/config or address= in a hostfile"
        )
        raise UnknownHost(cause, host=host, hint=hint) from None
    stage("connect")
    failures: list[str] = []
    silent = refused = True
    begun = None if dialed is None else dialed.sock
    for index, (family, _, protocol, _, address) in enumerate(addresses):
        # An equal share for each address left: a silent first address must not use up all the time.
        share = (deadline - time.monotonic()) / (len(addresses) - index)
        limit = min(share, settings.connect_timeout or share)
        if limit <= 0:
            break
        sock, begun = begun, None
        try:
            return _connect(family, protocol, address, limit, sock)
        except TimeoutError as error:
            failures.append(f"{address[0]}: no answer within {limit:.0f} s")
            silent = silent and error.errno is None
            refused = False
        except OSError as error:
            failures.append(f"{address[0]}: {_reason(error)}")
            silent = False
            refused = refused and isinstance(error, ConnectionRefusedError)
    if begun is not None:
        begun.close()
    cause = f"no connection to {name} port {port}: " + (
        "; ".join(failures) or "no time was left of --start-timeout"
    )
    hint = f"ping {name}; a firewall may drop packets to port {port}"
    # Silence until the deadline is a timeout; a refusal at the deadline is not.
    if silent and time.monotonic() >= deadline:
        raise StartTimeout(cause, host=host, hint=hint)
    if failures and refused:
        hint = "start sshd on that host, or give its port (-p PORT, or port= in a hostfile)"
    raise ConnectFailed(cause, host=host, hint=hint)


def is_near(sock: socket.socket) -> bool:
    """Return True if a round trip takes less than 2 ms, as in one room or campus; False if unknown."""
    rtt = _info(sock, _MIN_RTT)
    return rtt is not None and rtt < _NEAR


def silence(sock: socket.socket) -> float | None:
    """Return seconds since the peer's kernel acknowledged data; None if unknown."""
    milliseconds = _info(sock, _LAST_ACK_RECV)
    return None if milliseconds is None else milliseconds / 1000


def was_reset(sock: socket.socket) -> bool:
    """Return True if both directions are closed: a send may have received the error, and a read then finds the
    end.
    """
    return _info(sock, _STATE) == _CLOSED


def persist(sock: socket.socket) -> bool:
    """Retransmit unacknowledged data each second. The default pauses double, so a cut lasts up to twice as long.

    Returns False on kernels without the option (before Linux 6.15), and changes nothing. With short pauses,
    Linux would give up the connection after 14 s, so the user timeout is raised too.
    """
    if sys.platform != "linux":
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _LONGEST_PAUSE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT)
    except OSError:
        return False
    return True


def addresses_toward(settings: HostSettings) -> tuple[str, str]:
    """Return the local and the host's address by current routes and names, without sending; empty if unknown."""
    name, port = settings.hostname, settings.port
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            name, port, settings.address_family, socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0]), str(sock.getpeername()[0])
    return "", ""


def _connect(
    family: socket.AddressFamily, protocol: int, address: Any, limit: float, begun: QuickSocket | None
) -> QuickSocket:
    sock = begun or QuickSocket(family, socket.SOCK_STREAM, protocol)
    try:
        sock.settimeout(limit)
        if begun is None:
            sock.connect(address)
        else:
            _finish(begun, limit)
        # SSH sends small packets in both directions; Nagle's algorithm would delay each.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _finish(sock: socket.socket, limit: float) -> None:
    """Wait until a connection is open, with the errors of connect()."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(limit * 1000):
        raise TimeoutError("timed out")
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))


def _info(sock: socket.socket, field: struct.Struct) -> int | None:
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field.size)
    except OSError:  # closed meanwhile
        return None
    return int(field.unpack(info)[0]) if len(info) == field.size else None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


T = TypeVar("T")

_TRIES = 10
_FIRST_PAUSE = 0.2
_LONGEST_BACKOFF = 2.0


class ConnectLimit:
    """At most `limit` simultaneous handshakes with one address. Thread-safe.

    `random` returns numbers from 0 to 1; `clock` and `sleep` are as in the time module.
    """

    def __init__(
        self,
        limit: int,
        *,
        random: Callable[[], float] = any_random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._limit = limit
        self._random = random
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rooms: dict[str, threading.Semaphore] = {}

    def run(self, address: str, attempt: Callable[[], T], *, host: str, deadline: float) -> T:
        """Run `attempt` when the limit allows it and return its result; retry after SentAway, with a pause.

        The pauses double and are random, so that refused clients come back at different times. `host` is for
        messages. Raises StartTimeout and the errors of `attempt`, SentAway after ten attempts or at the
        deadline.
        """
        longest = _FIRST_PAUSE
        for _ in range(_TRIES - 1):
            try:
                with self._room(address, host, deadline):
                    return attempt()
            except SentAway:
                # Random, because hosts that were refused together would come back together.
                pause = longest * self._random()
                if self._clock() + pause >= deadline:
                    raise
            self._sleep(pause)
            longest = min(_LONGEST_BACKOFF, longest * 2)
        with self._room(address, host, deadline):
            return attempt()

    @contextmanager
    def _room(self, address: str, host: str, deadline: float) -> Iterator[None]:
        with self._lock:
            rooms = self._rooms.setdefault(address, threading.Semaphore(self._limit))
        if not rooms.acquire(timeout=max(0.0, deadline - self._clock())):
            raise StartTimeout(
                f"too many other connections to {address} were being made at the same time",
                host=host,
                hint=f"a longer --start-timeout, or a --connect-limit larger than {self._limit}",
            )
        try:
            yield
        finally:
            rooms.release()


class Early(NamedTuple):
    """The early part of a connection to a host."""

    settings: HostSettings
    dialed: Dialed | None


class EarlyStarts:
    """Resolves and dials hosts in a thread, for one later connection each. Thread-safe.

    A driver takes 50 ms from its command line to its first connection. Meanwhile ssh tells the hosts' settings, and the
    hosts' sshd start.

    Errors are left to the host's connection, which meets them again. `is_same_for_all` is asked after the first host: if
    each host costs a question to ssh, the others are left to their own threads.
    """

    def __init__(
        self,
        resolve: Callable[[Host], HostSettings],
        is_same_for_all: Callable[[], bool],
        dial: Callable[[HostSettings], Dialed | None] = lambda _settings: None,
    ) -> None:
        self._resolve = resolve
        self._is_same_for_all = is_same_for_all
        self._dial = dial
        self._changed = threading.Condition()
        self._ready: dict[Host, Early] = {}
        self._taken: set[Host] = set()
        self._at_work: Host | None = None
        self._is_closed = False

    def begin(self, hosts: Iterable[Host]) -> None:
        """Begin with these hosts, in order. Does not block."""
        threading.Thread(target=self._run, args=(tuple(hosts),), name="early", daemon=True).start()

    def hand_over(self, host: Host) -> Early | None:
        """Return what is ready for the host, at most once; waits if the thread is at work on this host."""
        with self._changed:
            self._taken.add(host)
            self._changed.wait_for(lambda: self._at_work != host)
            return self._ready.pop(host, None)

    def close(self) -> None:
        """Close the connections that nobody has taken. May be repeated."""
        with self._changed:
            self._is_closed = True
            for early in self._ready.values():
                _close_early(early)
            self._ready.clear()

    def _run(self, hosts: Sequence[Host]) -> None:
        dialed: set[tuple[str, int]] = set()
        for host in hosts:
            with self._changed:
                if self._is_closed:
                    return
                if host in self._taken:
                    continue
                self._at_work = host
            early: Early | None = None
            try:
                # The host's own thread meets and reports an error.
                with contextlib.suppress(HostError, OSError, UnicodeError):
                    settings = self._resolve(host)
                    address = settings.hostname, settings.port
                    early = Early(settings, None)
                    # One for each address: sshd's MaxStartups and --connect-limit count connections.
                    if address not in dialed:
                        dialed.add(address)
                        early = Early(settings, self._dial(settings))
            finally:
                with self._changed:
                    if early is not None and not self._is_closed:
                        self._ready[host] = early
                    elif early is not None:
                        _close_early(early)
                    self._at_work = None
                    self._changed.notify_all()
            if not self._is_same_for_all():
                return


def _close_early(early: Early) -> None:
    if early.dialed is not None:
        early.dialed.sock.close()
