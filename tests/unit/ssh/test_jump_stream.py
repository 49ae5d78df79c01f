"""A stream through a jump host ends without disturbing the others on the same connection."""

import contextlib
import socket
import struct
import threading
import time
from typing import Any

import pytest
from paramiko.channel import Channel
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EOF,
    cMSG_CHANNEL_CLOSE,
)
from paramiko.message import Message

from hvlaunch.errors import StartTimeout
from hvlaunch.ssh.by_paramiko.connection import JumpStream, SSHTransport, open_jump
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, connect, in_thread

CHANNEL, THEIRS = 3, 7
NAMES = {MSG_CHANNEL_DATA: "data", MSG_CHANNEL_EOF: "eof", MSG_CHANNEL_CLOSE: "close"}


class SlowTransport:
    """A jump host's connection, where data are on their way until they are let go; it keeps what has gone out."""

    on_close = SSHTransport.on_close

    def __init__(self):
        self.sending = threading.Event()
        self.let_go = threading.Event()
        self.sent = []
        self.streams = {}
        self.silent = 0.0
        self.has_hung_up = False

    def silence(self):
        return self.silent

    def hang_up(self):
        self.has_hung_up = True
        self.let_go.set()

    def get_log_channel(self):
        return "hvlaunch.ssh.paramiko"

    def _sanitize_packet_size(self, size):
        return size

    def _send_user_message(self, message):
        kind = NAMES[message.asbytes()[0]]
        if kind == "data":
            self.sending.set()
            assert self.let_go.wait(PATIENCE)
        self.sent.append(kind)

    def _unlink_channel(self, number):
        assert number == CHANNEL


@pytest.fixture
def transport():
    transport = SlowTransport()
    yield transport
    transport.let_go.set()


@pytest.fixture
def channel(transport):
    channel: Any = Channel(CHANNEL)  # with what types-paramiko leaves out
    channel._set_transport(transport)
    channel._set_window(1000, 1000)
    channel._set_remote_channel(THEIRS, 1000, 1000)
    return channel


@pytest.fixture
def stream(transport, channel):
    return JumpStream(transport, channel, "gate", "10.0.0.1", "n1")


def close_by_jump_host(channel):
    """Do as paramiko does when the jump host closes the channel."""
    message = Message()
    message.add_byte(cMSG_CHANNEL_CLOSE)
    message.add_int(CHANNEL)
    message.rewind()
    message.get_byte()
    message.get_int()
    SSHTransport._channel_handler_table[MSG_CHANNEL_CLOSE](channel, message)


@pytest.mark.parametrize("by", ["us", "the jump host"])
def test_no_data_follow_the_close(transport, channel, stream, by):
    """sshd ends the connection to the jump host over data for a channel that is closed."""
    sender, sent = in_thread(lambda: stream.send(b"x"))
    assert transport.sending.wait(PATIENCE)
    stream.close() if by == "us" else close_by_jump_host(channel)
    assert channel.closed
    assert transport.sent == []
    with pytest.raises(OSError, match="closed"):
        stream.send(b"more")
    assert transport.sent == []
    transport.let_go.set()
    sender.join()
    assert sent == [None]
    assert transport.sent == ["data", "eof", "close"]
    stream.close()
    assert transport.sent == ["data", "eof", "close"]


@pytest.mark.parametrize("silent", [0.5, 60.0])
def test_a_stuck_and_silent_connection_is_given_up_for_all(transport, stream, silent):
    """A sender holds the locks of its session, which continues over another connection."""
    transport.silent = silent
    sender, sent = in_thread(lambda: stream.send(b"x"))
    assert transport.sending.wait(PATIENCE)
    stream.close()
    assert transport.has_hung_up is (silent > 2)
    transport.let_go.set()
    sender.join()
    assert sent == [None]


def test_a_silent_idle_connection_stays_for_the_others(transport, stream):
    transport.silent = 60.0
    stream.close()
    assert not transport.has_hung_up


@pytest.mark.parametrize("by", ["us", "the jump host"])
def test_a_close_without_running_sends_is_told_at_once(transport, channel, stream, by):
    stream.close() if by == "us" else close_by_jump_host(channel)
    assert transport.sent == ["eof", "close"]
    assert stream.recv(1) == b""


def test_a_close_by_both_is_told_once(transport, channel, stream):
    stream.close()
    close_by_jump_host(channel)
    assert transport.sent == ["eof", "close"]


def test_a_send_waiting_for_room_ends_with_the_close(transport, channel, stream):
    transport.let_go.set()
    stream.settimeout(None)
    while channel.out_window_size:
        stream.send(b"x" * 1000)
    transport.sent.clear()
    sender, _ = in_thread(lambda: stream.send(b"y"))
    wait_until(lambda: stream._sends, "the send that waits")
    close_by_jump_host(channel)
    sender.join(PATIENCE)
    assert not sender.is_alive()
    assert transport.sent == ["eof", "close"]


def test_a_host_that_resets_its_connection_leaves_the_others_theirs(sshd):
    """With a real sshd as the jump host, and data on their way while it closes the channel."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(listener), contextlib.closing(_jump(sshd)) as jump:
        stream = jump.open_jump(listener.getsockname(), host="n1", timeout=PATIENCE)
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channel = stream._channel
        transport = channel.get_transport()
        send = transport._send_user_message
        on_its_way = threading.Event()

        def slow(message):
            if b"late" in message.asbytes():
                on_its_way.set()
                wait_until(lambda: channel.closed, "sshd to close the channel")
            send(message)

        transport._send_user_message = slow
        sender, sent = in_thread(lambda: stream.send(b"late"))
        assert on_its_way.wait(PATIENCE)
        peer.close()
        with contextlib.suppress(OSError):
            while not channel.closed:  # sshd notices when it writes
                channel.send(b"more")
        sender.join()
        assert sent == [None]
        other = jump.open_jump(listener.getsockname(), host="n2", timeout=PATIENCE)
        with contextlib.closing(listener.accept()[0]) as peer:
            other.send(b"x")
            assert peer.recv(1) == b"x"
        assert jump.is_open()
        other.close()


def _jump(sshd):
    return connect(sshd.host(), sshd.options(), timeout=PATIENCE)


class StuckTransport(SlowTransport):
    """A connection over which nothing more is sent, until it is let go; then the channel is there."""

    def __init__(self, channel):
        super().__init__()
        self.channel = channel

    def open_channel(self, *_, timeout):
        assert self.let_go.wait(PATIENCE)
        return self.channel

    def is_active(self):
        return True


def test_a_jump_over_a_stuck_connection_times_out(channel):
    """A blocked sender delays all others, and the request times out before it is sent."""
    stuck: Any = StuckTransport(channel)
    channel._set_transport(stuck)
    began = time.monotonic()
    with pytest.raises(StartTimeout, match=r"its jump host gate did not connect to n1 port 22 within 0 s"):
        open_jump(stuck, "gate", "10.0.0.1", ("n1", 22), host="n1", timeout=0.1)
    assert time.monotonic() - began < PATIENCE / 2
    assert not channel.closed
    stuck.let_go.set()
    wait_until(lambda: channel.closed, "the channel that came too late is closed")
