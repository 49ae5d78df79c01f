"""An agent that a launcher has started, over a real socket; and how the launcher's end of it is told from a failure."""

import socket
import ssl
import struct
import threading
from contextlib import closing, suppress
from itertools import islice
from unittest.mock import Mock

import pytest

from hvlaunch.agent.wire.caller import WORD_SIZE, Sealed
from hvlaunch.agent.wire.frames import Decoder, PieceWriter, encode
from hvlaunch.driver.program import AgentProgram
from hvlaunch.errors import AgentFailed, HostLost, HvlaunchError, StartTimeout
from hvlaunch.job import Host
from hvlaunch.mpi.calls import LauncherFailed, ReturnCalls
from hvlaunch.mpi.controller import _end
from hvlaunch.mpi.launched_agent import EndedByLauncher, LaunchedAgent, LauncherEnd, plain
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from tests.unit.gloo.fakes import HELLO, FakeListener

ABOUT = {"round": 0, "start": 0}

KEY = Certificate()


class Agent:
    """The other end of the connection."""

    def __init__(self, listener):
        self.socket = socket.create_connection(listener.getsockname())
        self.socket.settimeout(30)
        theirs, _ = listener.accept()
        self.theirs = Sealed(theirs, tls_context(KEY), server_side=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.sealed = Sealed(self.socket, context, server_side=False)
        shaking = threading.Thread(target=self.theirs.shake_hands)
        shaking.start()
        self.sealed.shake_hands()
        shaking.join()
        self._writer = PieceWriter()
        self._decoder = Decoder()

    def say(self, header, body=b""):
        self.sealed.sendall(b"".join(self._writer.cut(encode(header, body))))

    def program(self):
        self.word = self.take(WORD_SIZE)
        size = int.from_bytes(self.take(4), "big")
        return self.take(size)

    def take(self, size):
        return self.sealed.receive(size)

    def hear(self):
        while True:
            if frames := list(self._decoder.feed(self.sealed.receive(1))):
                return frames[0]


class Launched:
    def __init__(self, status=None):
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.agent = Agent(listener)
        self.returns = ReturnCalls()
        self.connection = LaunchedAgent(
            "a", self.agent.theirs, 2, lambda _: status, lambda: self.trouble, self.returns
        )
        self.trouble: HvlaunchError | None = None
        self.program = AgentProgram({}, None)
        self.listener = FakeListener()
        self.channel = self.connection.start_agent(self.program, Host("a"), self.listener)
        self._frames = self.channel.frames()

    def frames(self, count):
        return [*islice(self._frames, count)]

    def close(self):
        self.connection.close()
        self.agent.socket.close()
        self.agent.theirs.socket.close()


@pytest.fixture
def launched():
    with closing(Launched()) as launched:
        yield launched


def test_the_agent_gets_the_program_and_then_frames(launched):
    assert launched.connection.local_address == launched.connection.remote_address == "127.0.0.1"
    assert launched.connection.processes == 2
    launched.channel.send(({"type": "ping"}, b""))
    assert launched.agent.program() == launched.program.packed(is_near=True, with_ranks=True)
    assert launched.agent.hear() == ({"type": "ping"}, b"")


def test_error_of_the_driver_ends_the_frames(launched):
    launched.trouble = LauncherFailed("a stranger came", hint="ssh")
    launched.connection.close()
    with pytest.raises(AgentFailed, match="host a: a stranger came; try: ssh"):
        launched.frames(1)


def test_properties_of_a_launched_agent(launched):
    output = {"type": "output", "slot": 1, "stream": "stdout", **ABOUT}
    launched.agent.say(HELLO)
    assert launched.frames(1) == [(HELLO, b"")]
    assert launched.listener.heard == 1
    launched.agent.say(output, b"x" * 10_000)
    assert launched.frames(1) == [(output, b"x" * 10_000)]
    launched.agent.program()
    launched.agent.socket.close()
    assert launched.frames(1) == []
    assert launched.channel.stderr() == b""


def test_one_changed_byte_ends_the_connection(launched):
    record = bytearray(launched.agent.sealed.seal(b"x" * 100))
    record[50] ^= 1
    launched.agent.socket.sendall(record)
    with pytest.raises(OSError, match=r"(?i)bad record mac|decryption failed"):
        launched.frames(1)


def test_replayed_record_ends_the_connection(launched):
    record = launched.agent.sealed.seal(b"".join(PieceWriter().cut(encode(HELLO))))
    launched.agent.socket.sendall(record + record)
    with pytest.raises(OSError, match=r"(?i)bad record mac|decryption failed"):
        launched.frames(1)


def test_closing_ends_a_read(launched):
    launched.connection.close()
    with pytest.raises(ConnectionAbortedError):
        launched.frames(1)


def test_an_agent_that_calls_again_goes_on_over_the_new_connection(launched):
    launched.agent.program()
    called = threading.Event()
    launched.connection.on_call = called.set
    launched.agent.say(HELLO)
    launched.frames(1)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        agent = Agent(listener)
    launched.returns.add(launched.agent.word, agent.theirs)
    assert called.is_set()
    ears = FakeListener()
    connection, channel = launched.connection.rejoin(launched.program, Host("a"), "", ears, 60)
    agent.say({"type": "bye", "left": 0, "pids": []})
    assert next(channel.frames()) == ({"type": "bye", "left": 0, "pids": []}, b"")
    assert ears.heard == 1
    channel.send(({"type": "ping"}, b""))
    assert agent.hear() == ({"type": "ping"}, b"")
    connection.close()
    agent.socket.close()
    agent.theirs.socket.close()


def test_silent_agent_is_waited_for_and_disconnected(launched):
    launched.agent.program()
    with pytest.raises(StartTimeout, match=r"host a: its agent has not called within 0\.1 s"):
        launched.connection.rejoin(launched.program, Host("a"), "", launched.listener, 0.1)
    with pytest.raises(OSError, match="closed the connection"):
        launched.agent.take(1)
    with pytest.raises(ConnectionAbortedError):
        launched.frames(1)
    assert launched.connection.can_rejoin


def test_agent_of_an_ended_launcher_is_not_waited_for():
    with closing(Launched(5)) as launched, pytest.raises(HostLost, match="its launcher has ended"):
        launched.connection.rejoin(launched.program, Host("a"), "", launched.listener, 60)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux")
def test_reset_is_a_loss_even_after_a_failed_send(launched):
    launched.agent.program()
    launched.agent.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    launched.agent.socket.close()
    with pytest.raises(OSError, match="reset"):
        launched.channel.send(({"type": "ping"}, b""))
    with pytest.raises(ConnectionAbortedError, match="it was reset"):
        launched.frames(1)
    assert launched.connection.can_rejoin


def test_an_agent_that_has_ended_does_not_call_again(launched):
    launched.agent.program()
    launched.agent.socket.close()
    assert launched.frames(1) == []
    assert not launched.connection.can_rejoin


PARTING = {"type": "parting", "cause": "got SIGTERM"}
EXITED = {"type": "exited", **ABOUT, "max_rss": 1, "at": 1.0, "oom_killed": False, "port_taken_by": None}
TERMINATED = {**EXITED, "slot": 0, "code": None, "signal": 15}
FAILED = {**EXITED, "slot": 1, "code": 3, "signal": None}


@pytest.mark.parametrize(
    ("status", "code", "said"), [(3, 3, ", and then ended with exit code 3"), (None, 69, ""), (0, 69, "")]
)
def test_end_by_the_launcher_comes_after_earlier_frames(status, code, said):
    with closing(Launched(status)) as launched:
        output = {"type": "output", "slot": 0, "stream": "stderr", **ABOUT}
        launched.agent.say(PARTING)
        launched.agent.say(output, b"last words")
        launched.agent.say(TERMINATED)
        assert launched.frames(1) == [(output, b"last words")]
        with pytest.raises(
            EndedByLauncher, match=f"host a: the launcher ended its processes{said}"
        ) as caught:
            launched.frames(1)
        assert caught.value.exit_code == code


def test_agent_ended_by_its_launcher_is_no_lost_host():
    with closing(Launched(5)) as launched:
        launched.agent.say(PARTING)
        launched.agent.socket.close()
        with pytest.raises(EndedByLauncher):
            launched.frames(1)


@pytest.mark.parametrize(
    "cause", ["got SIGTERM", "its guardian was killed", "the launcher's process for slot 1 is gone"]
)
def test_worker_that_fails_while_the_launcher_ends_is_reported(cause):
    end = LauncherEnd(2)
    assert not end.concerns_driver({"type": "parting", "cause": cause})
    assert end.concerns_driver(FAILED)
    assert not end.is_over
    assert not end.concerns_driver(TERMINATED)
    assert end.is_over


def test_worker_that_the_launcher_prevented_has_not_failed():
    end = LauncherEnd(2)
    not_started = {"type": "not_started", **ABOUT, "slot": 1, "code": 126, "cause": "it is gone"}
    assert end.concerns_driver(not_started)
    assert not end.concerns_driver(PARTING)
    assert not end.concerns_driver(not_started)
    assert end.is_over


def test_an_end_before_the_workers_start_is_the_launchers():
    end = LauncherEnd(1)
    assert not end.concerns_driver(PARTING)
    assert end.concerns_driver({"type": "bye", "left": 0, "pids": []})
    assert end.is_over


def test_other_ends_are_reported_to_the_driver():
    end = LauncherEnd(1)
    assert end.concerns_driver(
        {"type": "parting", "cause": "received nothing from the driver for 30 seconds"}
    )
    assert end.concerns_driver(TERMINATED)
    assert end.concerns_driver({"type": "bye", "left": 0, "pids": []})
    end.connection_ended()
    assert not end.is_over


@pytest.mark.parametrize(
    ("said", "patience"),
    [
        ([{"type": "bye", "left": 0, "pids": []}], 10.0),
        ([PARTING, TERMINATED], 10.0),
        ([TERMINATED], 2.0),
        ([], 2.0),
    ],
)
def test_launcher_of_a_lost_host_gets_less_time(launched, said, patience):
    for header in said:
        launched.agent.say(header)
    launched.agent.program()
    launched.agent.socket.close()
    with suppress(OSError, EndedByLauncher):
        launched.frames(len(said) + 1)
    process = Mock()
    _end(Mock(is_complete=True), [launched.connection], process)
    process.close.assert_called_once_with(patience)


def test_addresses_of_sockets_for_both_families():
    assert plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain("fd77::1") == "fd77::1"
