"""paramiko's transport, with what hvlaunch needs beyond it."""

import contextlib
import logging
import signal
import socket
import threading
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

from paramiko.channel import Channel
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.ssh_exception import SSHException

from hvlaunch.ssh.paramiko_private import HookedTransport, forget_channel
from hvlaunch.ssh.streams.stream import Stream

__all__ = ["WINDOW", "ClientTransport"]

WINDOW = 4 << 20
"""Bytes that a host may send ahead of what we read."""

_LOG = "hvlaunch.ssh.paramiko"
_QUOTED = 300
"""Characters of the host's words that a message quotes."""
_LONGEST_PACKET = 256 << 10
"""PACKET_MAX_SIZE in OpenSSH's packet.c."""
_JOIN_PATIENCE = 2.0
_UNKNOWN_SIGNAL = 255
"""What ssh(1) returns for a command that a signal ended."""

# paramiko logs tracebacks of what the other side does wrong; that reaches the user as our errors.
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


class _Packetizer(Packetizer):
    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        """No packet is longer than OpenSSH takes, whatever length the host says: that is read before it is checked."""
        if n > _LONGEST_PACKET:
            raise SSHException(f"a packet of {n} bytes")
        return super().read_all(n, check_rekey)

    def start_handshake(self, timeout: float) -> None:
        """Start no timer: the deadline is ours, and paramiko's is a thread that holds up the end of the process."""


class _ChannelStream(Protocol):
    def closed_by_peer(self) -> None: ...


class ClientTransport(HookedTransport):
    """One SSH connection over a stream that is connected already."""

    def __init__(self, stream: Stream, name: str) -> None:
        super().__init__(cast("Any", stream), default_window_size=WINDOW, packetizer_class=_Packetizer)
        self.set_log_channel(_LOG)
        self.name = name
        self.farewell: str | None = None
        """Why the host disconnected, in its own words."""
        self.streams: WeakValueDictionary[int, _ChannelStream] = WeakValueDictionary()
        """The channels that other connections go through, by their numbers."""

    def silence(self) -> float | None:
        """See Connection."""
        return cast("Stream", self.sock).silence()

    def hang_up(self) -> None:
        """Close the connection and wait for its thread; unblocks every thread in it. May be repeated.

        The socket is shut down first: closed under a thread that reads it, its number could be another
        connection's by the time of the read.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self.is_alive() and self is not threading.current_thread():
            self.join(_JOIN_PATIENCE)
        self.close()
        self.sock.close()

    def get_exception(self) -> Exception | None:
        """What ended the connection. Whatever paramiko stumbled over, the host sent it, or who changed it on its way."""
        error = super().get_exception()
        if error is None or isinstance(error, EOFError | OSError | SSHException):
            return error
        unreadable = SSHException(f"what the host sent can't be read ({type(error).__name__})")
        unreadable.__cause__ = error
        return unreadable

    def on_request(self, channel: Channel, message: Message) -> bool:
        """Note a command's end by a signal, of which paramiko knows nothing (RFC 4254, section 6.10)."""
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
        """Who sends by the channel answers, where data and the answer must not cross."""
        stream = self.streams.get(channel.get_id())
        if stream is None:
            return False
        stream.closed_by_peer()
        forget_channel(self, channel)
        return True

    def on_disconnect(self, reason: str) -> None:
        self.farewell = " ".join(reason[:_QUOTED].split())
