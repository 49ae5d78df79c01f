"""The relay: other users of the host take no places of the job's own, and no host makes the driver grow."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import MOST_RELAYED
from hvlaunch.driver.links.relay import HostRelay
from hvlaunch.engine import events as on
from tests.security.conftest import BOB
from tests.security.test_frames import REACHED
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess
from tests.unit.agent.test_relay import ALWAYS
from tests.unit.gloo.link_rig import Rig

Launch = Callable[..., AgentProcess]

CROWD = """
import encodings.idna, os, selectors, socket, sys
uid, port, count = (int(word) for word in sys.argv[1:])
os.setuid(uid)
there = selectors.DefaultSelector()
def come():
    there.register(socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ)
for _ in range(count):
    come()
print("there", flush=True)
while True:
    for key, _ in there.select():
        there.unregister(key.fileobj)
        key.fileobj.close()
        come()
"""
"""Who says nothing, in many connections, and comes again whenever one is closed."""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's program takes root")
def test_a_crowd_of_another_user_leaves_half_of_the_places(launch: Launch) -> None:
    agent = launch(before="ulimit -n 40; ")  # 20 connections
    agent.hello(rendezvous=ALWAYS)
    port = agent.expect("reached")[0]["relay_port"]
    words = [sys.executable, "-c", CROWD, str(BOB), str(port), "60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as crowd:
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == b"there\n"
            agent.expect("relay", what="open", id=10)
            with ExitStack() as ours:
                for number in range(10):
                    sock = ours.enter_context(socket.create_connection(("127.0.0.1", port)))
                    sock.sendall(b"%d" % number)
                found = {agent.expect("relay", what="data")[1] for _ in range(10)}
            assert found == {b"%d" % number for number in range(10)}
        finally:
            crowd.kill()


class BusyServer:
    """A rendezvous whose thread is behind: its loop is given calls, and does none of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_over = False

    def endpoint(self) -> Any:
        return self, None

    def expect(self, addresses: Any) -> None: ...

    def call_soon_threadsafe(self, *call: Any) -> None:
        self.calls.append(call)

    def is_closed(self) -> bool:
        return self.is_over


def test_a_host_where_connections_come_and_go_is_not_ahead_of_the_server() -> None:
    server = BusyServer()
    relay = HostRelay("a", server, lambda _header, _body: None)

    def come_and_go() -> None:
        for number in range(1, 1000):
            for what in ("open", "close"):
                relay.obey({"type": "relay", "id": number, "what": what}, b"")

    host = threading.Thread(target=come_and_go)
    host.start()
    wait_until(lambda: len(server.calls) >= 64, "as many as may wait")
    _call, *arguments = server.calls[0]
    assert len(server.calls) == 64
    with suppress(TypeError):  # there is no client to make
        HostRelay._obey(relay, *arguments)
    wait_until(lambda: len(server.calls) >= 65, "one more")
    assert len(server.calls) == 65
    server.is_over = True
    host.join(60)
    assert not host.is_alive()


def test_a_host_that_takes_no_answers_opens_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it closes what it has opened, a bounded number of frames waits for it in the driver."""
    rig = Rig().ready()
    rig.channel.frame(REACHED | {"address": "127.0.0.1", "relay_port": 5})
    assert isinstance(rig.event(), on.RendezvousReached)
    rig.sent(1)
    outgoing = rig.link.session._outgoing
    takes, waits = threading.Event(), threading.Event()
    sizes = []
    write, wait = rig.channel.write, outgoing.wait_for_relayed

    def take(data: bytes) -> None:
        takes.wait()
        write(data)

    def wait_for_relayed(most: int) -> None:
        sizes.append(len(outgoing._relayed))
        if sizes[-1] > most:
            waits.set()
        wait(most)

    monkeypatch.setattr(rig.channel, "write", take)
    monkeypatch.setattr(outgoing, "wait_for_relayed", wait_for_relayed)
    for number in range(1, 2000):
        for what in ("open", "close"):
            rig.channel.frame({"type": "relay", "id": number, "what": what})
    rig.channel.frame({"type": "parting", "cause": "all is said"})
    assert waits.wait(60)
    takes.set()
    assert isinstance(rig.event(), on.HostParting)
    assert max(sizes) <= MOST_RELAYED + 2
    rig.link.close()
