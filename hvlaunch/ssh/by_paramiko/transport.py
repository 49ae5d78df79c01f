"""paramiko's transport over any stream, including a channel of a jump host's transport."""

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakValueDictionary

from paramiko.channel import Channel
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.ssh_exception import ChannelException, SSHException

from hvlaunch.errors import ConnectFailed, StartTimeout
from hvlaunch.ssh.paramiko_private import HookedTransport, close_here, forget_channel, send_message
from hvlaunch.ssh.streams import Stream, greeting_with

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["WINDOW", "JumpStream", "SSHTransport", "open_jump"]

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

    def on_request(self, channel: Channel, message: Message) -> bool:
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

    def on_close(self, channel: Channel) -> bool:
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
        self, transport: SSHTransport, channel: Channel, jump: str, local_address: str, name: str
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


def _open_channel(transport: SSHTransport, jump: str, target: tuple[str, int], timeout: float) -> Channel:
    """Open a channel in a thread of its own, because paramiko's timeout starts only after the request is sent.

    On a stuck connection the request waits for ever behind other senders. Raises the errors of open_channel(),
    and TimeoutError.
    """
    from concurrent.futures import Future  # noqa: PLC0415 (see streams/jumps.py)
    from concurrent.futures import TimeoutError as TooLate  # noqa: PLC0415

    future: Future[Channel] = Future()

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


def _close_late(future: "Future[Channel]") -> None:
    if future.exception() is None:
        future.result().close()


def _if_address(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""
