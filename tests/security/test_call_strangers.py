"""Strangers where agents call the driver (`--mpi`, `--srun`, `--jsrun`): those of the job come in beside them."""

import os
import socket
import ssl
import subprocess
import sys
import time
from contextlib import closing
from queue import SimpleQueue

import pytest

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY, Sealed
from hvlaunch.mpi.calls import AgentCaller, CallLimits, CallListener
from hvlaunch.mpi.request import caller_command
from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.rendezvous.serving.traffic import UnauthenticatedLimits
from tests.security.test_strangers import FLOOD, running

pytestmark = pytest.mark.timing

KEY = Certificate()
SOON = 8.0  # seconds: most of it is a Python that starts on a busy machine; strangers have 20 s each and more


def call(port: int) -> subprocess.Popen[bytes]:
    env = {**os.environ, ENTRY: "the word", CERTIFICATE: KEY.fingerprint, ADDRESSES: f"127.0.0.1 {port}"}
    return subprocess.Popen(caller_command((), sys.executable), env=env, stderr=subprocess.PIPE)


@pytest.mark.parametrize("kind", ["half-open", "drip"])
def test_an_agent_comes_in_beside_strangers(kind):
    callers: SimpleQueue[AgentCaller] = SimpleQueue()
    with (
        closing(CallListener("the word", KEY, callers.put)) as listener,
        running(str(FLOOD), kind, str(listener.port), "300", "127.0.0.2", "127.0.0.3") as (_, line),
    ):
        assert line == "there"
        for _ in range(3):
            began = time.monotonic()
            process = call(listener.port)
            caller = callers.get(timeout=60)
            assert time.monotonic() - began < SOON
            caller.connection.socket.close()
            process.communicate()


def test_an_unauthenticated_client_has_seconds_in_total():
    with (
        closing(CallListener("the word", KEY, lambda _: None, CallLimits(patience=0.3))) as listener,
        socket.create_connection(("127.0.0.1", listener.port), timeout=20) as stranger,
    ):
        stranger.settimeout(0.05)
        began = time.monotonic()
        while True:  # a byte now and then, and never all of a handshake
            assert time.monotonic() - began < 20
            try:
                stranger.send(b"x" if time.monotonic() - began < 0.2 else b"")
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_room_is_kept_at_an_address_that_the_job_has_called_from():
    callers: SimpleQueue[AgentCaller] = SimpleQueue()
    limits = CallLimits(
        UnauthenticatedLimits(all=1, from_one_address=1, from_known_address=5, turn=0), patience=60
    )
    with closing(CallListener("the word", KEY, callers.put, limits)) as listener:
        process = call(listener.port)
        callers.get(timeout=60).connection.socket.close()
        process.communicate()
        friend = socket.create_connection(("127.0.0.1", listener.port))
        strangers = [
            socket.create_connection(
                ("127.0.0.1", listener.port), source_address=("127.0.0.2", 0), timeout=20
            )
            for _ in range(10)
        ]
        for stranger in strangers[:-1]:
            assert stranger.recv(1) == b""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        greeted = Sealed(friend, context, server_side=False)
        greeted.shake_hands()
        assert greeted.fingerprint() == KEY.fingerprint
        for sock in (friend, *strangers):
            sock.close()
