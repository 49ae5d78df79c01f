"""paramiko's private names as they are in the version that is installed: each does what hvlaunch takes it for."""

import importlib
import inspect
import pkgutil
import re
import socket
import threading
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.agent import AgentSSH
from paramiko.channel import Channel
from paramiko.common import (
    AUTH_SUCCESSFUL,
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_REQUEST,
    OPEN_SUCCEEDED,
    cMSG_CHANNEL_CLOSE,
    cMSG_CHANNEL_EOF,
)
from paramiko.message import Message
from paramiko.transport import Transport

import hvlaunch.ssh
from hvlaunch.ssh import paramiko_private
from hvlaunch.ssh.paramiko_private import (
    HookedAgent,
    HookedTransport,
    close_here,
    forget_channel,
    send_message,
)
from tests.testhosts.places import wait_until

from .conftest import PATIENCE

ROOT = Path(__file__).parents[3]


def private(owner: object, name: str) -> Any:
    """Names that types-paramiko lacks."""
    return getattr(owner, name)


class Client(HookedTransport):
    """Keeps what the hooks were called with; `mine` are the channel requests that it takes itself."""

    mine = ()

    def __init__(self, sock):
        super().__init__(sock)
        self.seen = []

    def on_request(self, channel, message):
        start = message.packet.tell()
        kind = message.get_text()
        message.packet.seek(start)
        self.seen.append((kind, channel.get_id()))
        return kind in self.mine

    def on_close(self, channel):
        self.seen.append(("close", channel.get_id()))
        return False

    def on_disconnect(self, reason):
        self.seen.append(("disconnect", reason))


class Server(paramiko.ServerInterface):
    def check_auth_none(self, username):
        return AUTH_SUCCESSFUL

    def check_channel_request(self, kind, chanid):
        return OPEN_SUCCEEDED


@pytest.fixture
def pair():
    """A client and a server, with an open channel between them."""
    ours, theirs = socket.socketpair()
    with closing(Client(ours)) as client, closing(Transport(theirs)) as server:
        server.add_server_key(paramiko.ECDSAKey.generate())
        ready = threading.Event()
        server.start_server(ready, Server())
        client.start_client(timeout=PATIENCE)
        client.auth_none("ada")
        channel = client.open_session(timeout=PATIENCE)
        answer = server.accept(PATIENCE)
        yield client, server, channel, answer


def test_the_version_is_one_of_those_that_hvlaunch_asks_for():
    packaging = "".join((ROOT / name).read_text() for name in ("setup.py", "pyproject.toml"))
    ((least, limit),) = re.findall(r'"paramiko>=(\d+),<(\d+)"', packaging)
    assert int(least) <= int(metadata.version("paramiko").partition(".")[0]) < int(limit)


def test_a_cipher_with_its_own_mac_comes_first_and_host_keys_are_what_was_set(pair):
    client, *_ = pair
    assert "-gcm@" in client.local_cipher
    usual = private(Transport, "_preferred_ciphers")
    assert set(HookedTransport._preferred_ciphers) == {name for name in usual if not name.endswith("-cbc")}
    client.get_security_options().key_types = ("ssh-ed25519",)
    assert client.preferred_keys == ("ssh-ed25519",)


def test_the_cheapest_key_exchange_comes_behind_the_hybrid_and_before_all_others():
    usual = [name for name in private(Transport, "_preferred_kex") if not name.endswith("-sha1")]
    first, second, *others = HookedTransport._preferred_kex
    assert (first, second) == ("mlkem768x25519-sha256", "ecdh-sha2-nistp256")
    assert others == [name for name in usual if name not in (first, second)]


def test_reading_waits_for_bytes_without_end():
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs), closing(Transport(ours)), closing(HookedTransport(theirs)):
        assert ours.gettimeout() == private(Transport, "_active_check_timeout")
        assert theirs.gettimeout() is None


def test_requests_and_ends_pass_by_the_hooks_and_then_reach_paramiko(pair):
    client, _, channel, answer = pair
    answer.send_exit_status(3)
    assert channel.recv_exit_status() == 3
    answer.close()
    wait_until(lambda: channel.closed, "the end of the channel")
    assert client.seen == [("exit-status", channel.get_id()), ("close", channel.get_id())]


def test_a_hook_can_hide_messages_from_paramiko(pair):
    client, _, channel, answer = pair
    client.mine = ("exit-status",)
    answer.send_exit_status(3)
    answer.close()
    wait_until(lambda: channel.closed, "the end of the channel")
    assert channel.exit_status == -1


def test_a_farewell_is_heard(pair):
    client, server, *_ = pair
    message = Message()
    message.add_byte(bytes([paramiko.common.MSG_DISCONNECT]))
    message.add_int(2)
    message.add_string("Too many authentication failures")
    message.add_string("")
    send_message(server, message)
    wait_until(lambda: client.seen, "the farewell")
    assert client.seen == [("disconnect", "Too many authentication failures")]


def test_a_channel_is_closed_here_and_the_host_is_told_when_its_messages_are_sent(pair):
    client, _, channel, answer = pair
    end, close = close_here(channel)
    assert (end.asbytes()[:1], close.asbytes()[:1]) == (cMSG_CHANNEL_EOF, cMSG_CHANNEL_CLOSE)
    assert channel.closed
    assert close_here(channel) == []
    assert not answer.closed
    for message in (end, close):
        send_message(client, message)
    wait_until(lambda: answer.closed, "the end at the host")


def test_a_forgotten_channel_leaves_the_connection(pair):
    client, _, channel, _ = pair
    assert client._channels.get(channel.get_id()) is channel
    forget_channel(client, channel)
    assert client._channels.get(channel.get_id()) is None


def test_every_question_to_an_agent_is_asked_by_us():
    class Agent(HookedAgent):
        questions = 0

        def ask(self, question):
            self.questions += 1
            return super().ask(question)

    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        no_keys = b"\x0c" + bytes(4)
        for _ in range(2):
            theirs.sendall(len(no_keys).to_bytes(4, "big") + no_keys)
        agent = Agent()
        agent.begin(ours)
        assert agent.get_keys() == ()
        key = paramiko.AgentKey(agent, paramiko.ECDSAKey.generate().asbytes())
        private(key.agent, "_send_message")(b"\x0b")
        assert agent.questions == 2


def test_the_names_that_are_taken_over_are_there():
    assert private(Transport, "_channel_handler_table")[MSG_CHANNEL_REQUEST] is private(
        Channel, "_handle_request"
    )
    assert private(Transport, "_channel_handler_table")[MSG_CHANNEL_CLOSE] is private(
        Channel, "_handle_close"
    )
    for name in ("preferred_keys", "_parse_disconnect"):
        assert name in vars(Transport)
    assert "_send_message" in vars(AgentSSH)


def test_no_other_module_of_ours_has_a_private_name_of_paramikos():
    for module in pkgutil.walk_packages(hvlaunch.ssh.__path__, "hvlaunch.ssh."):
        if module.name == paramiko_private.__name__:
            continue
        found = importlib.import_module(module.name)
        text = inspect.getsource(found)
        if "paramiko" in text:
            assert not re.findall(r"(?<!self)(?<!cls)\._[a-z]\w*\b(?=.*SLF001)", text), module.name
        for made in vars(found).values():
            if isinstance(made, type) and made.__module__ == module.name:
                theirs = [base for base in made.__mro__ if base.__module__.startswith("paramiko.")]
                taken = {name for base in theirs for name in vars(base) if re.match("_[a-z]", name)}
                assert not taken & vars(made).keys(), made
