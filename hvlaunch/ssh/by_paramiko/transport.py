"""paramiko's transport, with what hvlaunch needs beyond it."""

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast
from weakref import WeakValueDictionary

from paramiko.channel import Channel
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_REQUEST
from paramiko.message import Message
from paramiko.packet import Packetizer
from paramiko.transport import Transport

from hvlaunch.ssh.streams.stream import Stream

__all__ = ["WINDOW", "ClientTransport"]

WINDOW = 4 << 20
"""Bytes that a host may send ahead of what we read."""

_LOG = "hvlaunch.ssh.paramiko"
_JOIN_PATIENCE = 2.0
_UNKNOWN_SIGNAL = 255
"""What ssh(1) returns for a command that a signal ended."""

# paramiko logs tracebacks of what the other side does wrong; that reaches the user as our errors.
logging.getLogger(_LOG).addHandler(logging.NullHandler())
logging.getLogger(_LOG).propagate = False


class _Packetizer(Packetizer):
    def start_handshake(self, timeout: float) -> None:
        """Start no timer: the deadline is ours, and paramiko's is a thread that holds up the end of the process."""


def _take_request(channel: Channel, message: Message) -> None:
    """Note a command's end by a signal, of which paramiko knows nothing (RFC 4254, section 6.10)."""
    start = message.packet.tell()
    if message.get_text() != "exit-signal":
        message.packet.seek(start)
        channel._handle_request(message)  # type: ignore[attr-defined]  # noqa: SLF001  (paramiko's own handler)
        return
    message.get_boolean()
    number = getattr(signal, "SIG" + message.get_text(), None)
    channel.exit_status = 128 + number if isinstance(number, signal.Signals) else _UNKNOWN_SIGNAL
    channel.status_event.set()


def _take_close(channel: Channel, message: Message) -> None:
    """The host closes a channel: who sends by it answers, where data and the answer must not cross."""
    transport = cast("ClientTransport", channel.get_transport())
    stream = transport.streams.get(channel.get_id())
    if stream is None:
        channel._handle_close(message)  # type: ignore[attr-defined]  # noqa: SLF001  (paramiko's own handler)
    else:
        stream.closed_by_peer()
        transport._unlink_channel(channel.get_id())  # type: ignore[attr-defined]  # noqa: SLF001  (not in the stubs)


class _ChannelStream(Protocol):
    def closed_by_peer(self) -> None: ...


class ClientTransport(Transport):
    """One SSH connection over a stream that is connected already."""

    _channel_handler_table: ClassVar[dict[int, Callable[[Channel, Message], None]]] = {
        **Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001  (not in the stubs)
        MSG_CHANNEL_CLOSE: _take_close,
        MSG_CHANNEL_REQUEST: _take_request,
    }

    # AES-GCM needs no MAC beside it, which would take as long again; paramiko has it last.
    _preferred_ciphers = tuple(
        sorted(Transport._preferred_ciphers, key=lambda name: "-gcm@" not in name)  # type: ignore[attr-defined]  # noqa: SLF001  (as above)
    )

    # Wait for bytes, not for a tenth of a second: closing the stream is what ends the wait.
    _active_check_timeout = None

    def __init__(self, stream: Stream, name: str) -> None:
        super().__init__(cast("Any", stream), default_window_size=WINDOW, packetizer_class=_Packetizer)
        self.set_log_channel(_LOG)
        self.name = name
        self.farewell: str | None = None
        """Why the host disconnected, in its own words."""
        self.streams: WeakValueDictionary[int, _ChannelStream] = WeakValueDictionary()
        """The channels that other connections go through, by their numbers."""

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Host keys as they were set: paramiko would ask for certificates in any case."""
        return tuple(self._preferred_keys)  # type: ignore[attr-defined]  # not in the stubs

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

    def _parse_disconnect(self, message: Message) -> None:
        message.get_int()
        self.farewell = message.get_text()
