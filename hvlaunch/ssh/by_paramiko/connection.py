"""An SSH connection by paramiko: its transport over any stream, its channels, and streams through jump hosts."""

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakValueDictionary

from paramiko.channel import Channel as Session
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.ssh_exception import ChannelException, SSHException

from hvlaunch.errors import ConnectFailed, HostError, HostLost, StartTimeout
from hvlaunch.ssh import Channel, Tail
from hvlaunch.ssh.paramiko_private import HookedTransport, close_here, forget_channel, send_message
from hvlaunch.ssh.streams import Stream, greeting_with

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["WINDOW", "JumpStream", "ParamikoChannel", "ParamikoConnection", "SSHTransport", "open_jump"]


WINDOW = 4 << 20
"""Bytes that a host may send before we read them."""

_LOG = "hvlaunch.ssh.paramiko"
_QUOTED = 300
"""Characters of the host's text that a message quotes."""
_LONGEST_PACKET = 256 << 10
"""PACKET_MAX_SIZE in OpenSSH's packet.c."""
_JOIN_PATIENCE = 2.0
_UNKNOWN_SIGNAL = 255
"""Exit code of ssh(1) for a command that a signal ended."""

# paramiko logs tracebacks for errors of the other side; users get hvlaunch's errors instead.
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


class _Packetizer(Packetizer):
    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """Refuse packets longer than OpenSSH's limit: paramiko reads the announced length before it checks it."""
        if n > _LONGEST_PACKET:
            raise SSHException(f"a packet of {n} bytes")
        return super().read_all(n, check_rekey)

    def start_handshake(self, timeout: float) -> None:
        """Start no timer: hvlaunch has its own deadline, and paramiko's timer thread delays the end of the
        process.
        """


class _ChannelStream(Protocol):
    def closed_by_peer(self) -> None: ...


class SSHTransport(HookedTransport):
    """One SSH connection over a connected stream."""

    def __init__(self, stream: Stream, name: str) -> None:
        super().__init__(cast("Any", stream), default_window_size=WINDOW, packetizer_class=_Packetizer)
        self.set_log_channel(_LOG)
        self.name = name
        self.farewell: str | None = None
        """The host's reason for the disconnect."""
        self.streams: WeakValueDictionary[int, _ChannelStream] = WeakValueDictionary()
        """Channels that carry other connections, by number."""

    def silence(self) -> float | None:
        """See Connection."""
        return cast("Stream", self.sock).silence()

    def hang_up(self) -> None:
        """Close the connection and wait for its thread; unblocks every thread in it. May be repeated.

        The socket is shut down before it is closed: if it were closed under a thread that reads it, the read
        could hit another connection with the same descriptor.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.is_alive() and self is not threading.current_thread():
            self.join(_JOIN_PATIENCE)
        self.close()
        self.sock.close()

    def get_exception(self) -> Exception | None:
        """Return the error that ended the connection. Unexpected exceptions of paramiko mean unreadable data."""
        error = super().get_exception()
        if error is None or isinstance(error, EOFError | OSError | SSHException):
            return error
        unreadable = SSHException(f"the data from the host can't be read ({type(error).__name__})")
        unreadable.__cause__ = error
        return unreadable

    def on_request(self, channel: Session, message: Message) -> bool:
        """Record a command's end by a signal, which paramiko does not know (RFC 4254, section 6.10)."""
        # Other requests must be read again by paramiko, from their beginning.
        start = message.packet.tell()
        if message.get_text() != "exit-signal":
            message.packet.seek(start)
            return False
        message.get_boolean()
        number = getattr(signal, "SIG" + message.get_text(), None)
        channel.exit_status = 128 + number if isinstance(number, signal.Signals) else _UNKNOWN_SIGNAL
        channel.status_event.set()
        return True

    def on_close(self, channel: Session) -> bool:
        """Let the JumpStream answer the close of its channel, because data must not follow the answer."""
        stream = self.streams.get(channel.get_id())
        if stream is None:
            return False
        stream.closed_by_peer()
        forget_channel(self, channel)
        return True

    def on_disconnect(self, reason: str) -> None:
        self.farewell = " ".join(reason[:_QUOTED].split())


_PROHIBITED = 1
_CLOSE_PATIENCE = 1.0
_STUCK = 2.0
"""Seconds without an acknowledgement."""
_LATE = 0.2
"""Seconds for paramiko to report its own timeout first."""


class JumpStream:
    """A Stream over `channel` of `transport`, from the jump host `jump` to the host.

    `local_address` is ours as the jump host sees it, and `name` is the host's name on the jump host. If data
    follow the channel's close, sshd ends the connection to the jump host for all hosts behind it ("nonexistent
    channel"). paramiko sends outside its lock, so a close from either side waits here for running sends.
    """

    greeting = b""
    is_near = False

    def __init__(
        self, transport: SSHTransport, channel: Session, jump: str, local_address: str, name: str
    ) -> None:
        self.local_address = local_address
        self.remote_address = _if_address(name)
        self._transport = transport
        self._channel = channel
        self._jump = jump
        self._lock = threading.Condition()
        self._sends = 0
        self._farewell: list[Message] = []
        """Messages that tell the jump host of the close."""
        transport.streams[channel.get_id()] = self

    def silence(self) -> float | None:
        return self._transport.silence()

    def recv(self, size: int, /) -> bytes:
        data = self._channel.recv(size)
        self.greeting = greeting_with(self.greeting, data)
        return data

    def send(self, data: bytes, /) -> int:
        with self._lock:
            # Counted, because paramiko sends outside its lock, and a close must not overtake a send.
            self._sends += 1
        try:
            return self._channel.send(data)
        finally:
            with self._lock:
                self._sends -= 1
                self._lock.notify_all()
            self._say_farewell()

    def settimeout(self, seconds: float | None, /) -> None:
        self._channel.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:  # noqa: ARG002  (SSH only ever ends both directions)
        self.close()

    def close(self) -> None:
        """Close this end at once; tell the jump host, unless its connection is stuck.

        If a send is running and the jump host acknowledges nothing, the connection is given up for all hosts:
        the sender would wait for ever.
        """
        if self._close_here():
            polite = threading.Thread(
                target=self._say_farewell, name=f"close through {self._jump}", daemon=True
            )
            polite.start()
            polite.join(_CLOSE_PATIENCE)
            # The jump host acknowledges nothing, and a running send holds its locks for ever.
            if (self._transport.silence() or 0.0) > _STUCK and not self._are_sends_through():
                self._transport.hang_up()

    def _are_sends_through(self) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: not self._sends, _CLOSE_PATIENCE)

    def closed_by_peer(self) -> None:
        """Handle the jump host's close of the channel; see ClientTransport."""
        self._close_here()
        self._say_farewell()

    def problem(self) -> str | None:
        if self._transport.is_active():
            return None
        return f"the connection to its jump host {self._jump} was lost"

    def _close_here(self) -> bool:
        """Refuse new sends and end waiting ones. Return True if the channel was open."""
        farewell = close_here(self._channel)
        with self._lock:
            self._farewell += farewell
        return bool(farewell)

    def _say_farewell(self) -> None:
        """Tell the jump host, unless a send is running; then its thread does it."""
        with self._lock:
            if self._sends:
                return
            farewell, self._farewell = self._farewell, []
        with contextlib.suppress(EOFError, OSError, SSHException):
            for message in farewell:
                send_message(self._transport, message)


def open_jump(
    transport: SSHTransport,
    jump: str,
    local_address: str,
    target: tuple[str, int],
    *,
    host: str,
    timeout: float,
) -> JumpStream:
    """Let the jump host connect to `target`, a name as the jump host knows it and a port, within `timeout` seconds.

    `host` is for messages. Raises ConnectFailed, StartTimeout.
    """
    destination = f"{target[0]} port {target[1]}"
    try:
        channel = _open_channel(transport, jump, target, timeout)
    except ChannelException as error:
        hint = None
        if error.code == _PROHIBITED:
            hint = f"set `AllowTcpForwarding yes` in the sshd_config of {jump}; ssh -J needs it too"
        cause = f"its jump host {jump} can't connect to {destination}: {error.text}"
        raise ConnectFailed(cause, host=host, hint=hint) from None
    except (EOFError, OSError, SSHException) as error:
        if transport.is_active():
            cause = f"its jump host {jump} did not connect to {destination} within {timeout:.0f} s"
            raise StartTimeout(cause, host=host) from None
        cause = f"the connection to its jump host {jump} was lost: {error}"
        raise ConnectFailed(cause, host=host) from None
    return JumpStream(transport, channel, jump, local_address, target[0])


def _open_channel(transport: SSHTransport, jump: str, target: tuple[str, int], timeout: float) -> Session:
    """Open a channel in a thread of its own, because paramiko's timeout starts only after the request is sent.

    On a stuck connection the request waits for ever behind other senders. Raises the errors of open_channel(),
    and TimeoutError.
    """
    from concurrent.futures import Future  # noqa: PLC0415 (5 ms; few hosts are behind others)
    from concurrent.futures import TimeoutError as TooLate  # noqa: PLC0415

    future: Future[Session] = Future()

    def open_it() -> None:
        try:
            channel = transport.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=timeout)
        except BaseException as error:  # noqa: BLE001 (of who waits)
            future.set_exception(error)
        else:
            future.set_result(channel)

    threading.Thread(target=open_it, name=f"through {jump}", daemon=True).start()
    try:
        return future.result(timeout + _LATE)
    except TooLate:
        # A channel that opens after all must be closed, or it stays open on the jump host.
        future.add_done_callback(_close_late)
        raise TimeoutError from None


def _close_late(future: "Future[Session]") -> None:
    if future.exception() is None:
        future.result().close()


def _if_address(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""


_CHUNK = 32 * 1024
_MOST_READ = 1 << 18
"""Maximum bytes of one read(): the reader of frames copies them several times."""
_STDERR_PATIENCE = 1.0


class ParamikoChannel:
    """A Channel over `session`, in which a command is running."""

    def __init__(self, transport: SSHTransport, session: Session) -> None:
        self._transport = transport
        self._session = session
        self._tail = Tail()
        self._given_up = False
        self._drain = threading.Thread(
            target=self._drain_stderr, name=f"{transport.name} stderr", daemon=True
        )
        self._drain.start()

    def read(self) -> bytes:
        try:
            data = self._session.recv(_MOST_READ)
        except (EOFError, SSHException) as error:
            raise self._lost() from error
        # A host reports the end of stdout or of the command. An end without a report means a lost connection.
        ended = self._session.eof_received or self._session.exit_status >= 0
        if data or (ended and not self._given_up):
            return data
        raise self._lost()

    def write(self, data: bytes) -> None:
        start = 0
        try:
            while start < len(data):
                sent = self._session.send(data[start : start + _CHUNK])
                if sent == 0:
                    raise BrokenPipeError("the command is gone")
                start += sent
        except (EOFError, SSHException) as error:
            raise self._lost() from error

    def stderr(self) -> bytes:
        if self._session.eof_received or self._session.closed:
            self._drain.join(_STDERR_PATIENCE)
        return self._tail.get()

    def exit_status(self, timeout: float) -> int | None:
        self._session.status_event.wait(timeout)
        status = self._session.exit_status
        return status if status >= 0 else None

    def close(self) -> None:
        """Tell the host, if it listens; if the connection is stuck, give up the whole connection."""
        self._given_up = True
        if self._session.closed:
            return
        polite = threading.Thread(
            target=self._close_session, name=f"{self._transport.name} close", daemon=True
        )
        polite.start()
        polite.join(_CLOSE_PATIENCE)
        # Another sender blocks the connection, and its locks: only a shutdown frees the threads.
        if polite.is_alive():
            self._transport.hang_up()

    def _close_session(self) -> None:
        with contextlib.suppress(EOFError, OSError, SSHException):
            self._session.close()

    def _drain_stderr(self) -> None:
        with contextlib.suppress(EOFError, OSError, SSHException):
            while data := self._session.recv_stderr(WINDOW):
                self._tail.add(data)

    def _lost(self) -> ConnectionError:
        if self._transport.is_active():
            return ConnectionAbortedError("the channel is closed")
        return ConnectionResetError(f"the connection was lost{_because(self._transport.farewell)}")


def _because(farewell: str | None) -> str:
    return f": {farewell}" if farewell else ""


class ParamikoConnection:
    """A Connection over an authenticated transport.

    `host` is for messages; `timeout` limits the start of a command.
    """

    def __init__(self, host: str, transport: SSHTransport, stream: Stream, timeout: float) -> None:
        self.local_address: str | None = stream.local_address
        self.remote_address: str | None = stream.remote_address
        self.is_near = stream.is_near
        self.silence = stream.silence
        self._host = host
        self._transport = transport
        self._timeout = timeout

    def run(self, command: str) -> Channel:
        started = time.monotonic()
        # exec_command() has no timeout, so a timer closes the connection.
        watch = threading.Timer(self._timeout, self.close)
        watch.daemon = True
        watch.start()
        try:
            session = self._transport.open_session(timeout=self._timeout)
            session.exec_command(command)
        except ChannelException as error:
            raise HostError(f"its sshd refused to open a session: {error.text}", host=self._host) from None
        except (EOFError, OSError, SSHException) as error:
            # The timer closed the connection, so the error itself says only that it was closed.
            if time.monotonic() - started >= self._timeout:
                cause = f"its sshd did not start a command within {self._timeout:g} s"
                raise StartTimeout(cause, host=self._host) from None
            if self._transport.is_active():
                raise HostError(f"its sshd refused to run a command: {error}", host=self._host) from None
            raise HostLost("the connection was lost before the command started", host=self._host) from None
        finally:
            watch.cancel()
        return ParamikoChannel(self._transport, session)

    def open_jump(self, target: tuple[str, int], *, host: str, timeout: float) -> JumpStream:
        """Open a stream through this host to the next one. Raises ConnectFailed, StartTimeout."""
        local_address = self.local_address or ""
        return open_jump(self._transport, self._host, local_address, target, host=host, timeout=timeout)

    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        self._transport.hang_up()
