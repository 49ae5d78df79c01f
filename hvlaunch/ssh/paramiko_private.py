"""The private names of paramiko that hvlaunch uses; nothing else touches them."""

import socket
import threading
from collections.abc import Callable
from typing import Any, ClassVar, cast

from paramiko.agent import AgentSSH
from paramiko.channel import Channel
from paramiko.common import MSG_CHANNEL_CLOSE, MSG_CHANNEL_REQUEST
from paramiko.message import Message
from paramiko.ssh_exception import SSHException
from paramiko.transport import Transport

__all__ = ["AgentClient", "HookedAgent", "HookedTransport", "close_here", "forget_channel", "send_message"]

_SHA1_KEYS = ("ssh-rsa", "ssh-dss")

# mypy: disable-error-code="attr-defined,misc"
# ruff: noqa: SLF001


def _on_request(channel: Channel, message: Message) -> None:
    if not cast("HookedTransport", channel.get_transport()).on_request(channel, message):
        channel._handle_request(message)


def _on_close(channel: Channel, message: Message) -> None:
    if not cast("HookedTransport", channel.get_transport()).on_close(channel):
        channel._handle_close(message)


class HookedTransport(Transport):
    """paramiko's transport; subclasses see some of the host's messages first, in paramiko's thread."""

    _channel_handler_table: ClassVar[dict[int, Callable[[Channel, Message], None]]] = {
        **Transport._channel_handler_table,
        MSG_CHANNEL_CLOSE: _on_close,
        MSG_CHANNEL_REQUEST: _on_request,
    }

    # AES-GCM comes first: a separate MAC would double the time, but paramiko has AES-GCM last. Weak algorithms are
    # not offered: no CBC, no 3DES, no MACs of SHA-1 or MD5. MACs over the ciphertext come first.
    _preferred_ciphers = tuple(
        sorted(
            (name for name in Transport._preferred_ciphers if not name.endswith("-cbc")),
            key=lambda name: "-gcm@" not in name,
        )
    )
    _preferred_macs = tuple(
        sorted(
            (name for name in Transport._preferred_macs if name.startswith("hmac-sha2-")),
            key=lambda name: "-etm@" not in name,
        )
    )
    # sshd's own curve25519 takes 1.6 ms of each host's processor more than OpenSSL's nistp256. The hybrid that withstands
    # quantum computers stays first.
    _preferred_kex = tuple(
        sorted(
            (name for name in Transport._preferred_kex if not name.endswith("-sha1")),
            key=lambda name: ("mlkem" not in name, name != "ecdh-sha2-nistp256"),
        )
    )
    _preferred_keys = tuple(name for name in Transport._preferred_keys if name not in _SHA1_KEYS)
    _preferred_pubkeys = tuple(name for name in Transport._preferred_pubkeys if name not in _SHA1_KEYS)

    # Block until bytes come instead of polling ten times a second; closing the stream ends the wait.
    _active_check_timeout = None

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """Host key algorithms as set; paramiko would always add certificates."""
        return tuple(self._preferred_keys)

    def sign_only_with(self, algorithms: tuple[str, ...]) -> None:
        """Restrict the signature algorithms of the user's keys."""
        self._preferred_pubkeys = algorithms

    def on_request(self, channel: Channel, message: Message) -> bool:  # noqa: ARG002 (for subclasses)
        """Handle a channel request; return True if it is handled completely."""
        return False

    def on_close(self, channel: Channel) -> bool:  # noqa: ARG002 (for subclasses)
        """Handle the host's close of a channel; return True if it is handled completely."""
        return False

    def on_disconnect(self, reason: str) -> None:
        """Handle the host's disconnect message."""

    def _parse_debug(self, message: Message) -> None:
        """Drop the host's debug messages: paramiko formats each of them for a log that nobody reads."""

    def _parse_disconnect(self, message: Message) -> None:
        message.get_int()
        self.on_disconnect(message.get_text())


def forget_channel(transport: Transport, channel: Channel) -> None:
    """Release the number of a channel that is closed at both ends."""
    transport._unlink_channel(channel.get_id())


def close_here(channel: Channel) -> list[Message]:
    """Close a channel at this end, and return the messages that tell the host; empty if it was closed already."""
    with channel.lock:
        messages = channel._close_internal()
    return [message for message in messages if message is not None]


def send_message(transport: Transport, message: Message) -> None:
    """Send a message after a pending key exchange. Raises OSError, EOFError, SSHException."""
    transport._send_user_message(message)


class HookedAgent(AgentSSH):
    """paramiko's client of an ssh agent; all questions go through ask(), from any thread."""

    def begin(self, sock: socket.socket) -> None:
        """Request the keys through a socket to the agent. Raises OSError, SSHException."""
        self._connect(sock)

    def ask(self, question: Any) -> Any:
        """Return the agent's answer. Raises OSError, SSHException."""
        return super()._send_message(question)

    def _send_message(self, message: Any) -> Any:
        return self.ask(message)


_PATIENCE = 30.0
"""Seconds for an answer. The agent may ask its user first; a dead forwarding never answers."""


class AgentClient(HookedAgent):
    """The ssh agent at the socket `path`, and its current keys.

    paramiko's own client would mix up questions and answers of several threads, and would wait for ever. Raises
    OSError and SSHException.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._turn = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_PATIENCE)
        try:
            self._socket.connect(path)
            self.begin(self._socket)
        except (OSError, SSHException):
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def ask(self, question: Any) -> Any:
        # One question at a time: the agent's protocol has no ids, and answers come in order.
        with self._turn:
            try:
                return super().ask(question)
            except OSError:
                # A late answer would be taken for the answer to the next question.
                self.close()
                raise
