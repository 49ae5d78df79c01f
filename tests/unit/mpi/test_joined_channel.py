"""Several agents' connections as one channel, over real sockets."""

import socket
import ssl
import threading
from contextlib import closing
from itertools import islice

import pytest

from hvlaunch.agent.caller import Sealed
from hvlaunch.agent.frames import Decoder, encode
from hvlaunch.agent.pieces import PieceWriter
from hvlaunch.errors import AgentFailed, HvlaunchError
from hvlaunch.gloo.driver.agent_program import AgentProgram
from hvlaunch.job import Host
from hvlaunch.mpi.joined_channel import JoinedConnection, plain
from hvlaunch.mpi.launcher_errors import EndedByLauncher, LauncherFailed
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from tests.unit.gloo.fakes import HELLO, FakeListener

ABOUT = {"round": 0, "start": 0}

KEY = Certificate()


class Agent:
    """The other end of one of the joined's connections."""

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
        size = int.from_bytes(self.take(4), "big")
        return self.take(size)

    def take(self, size):
        return self.sealed.receive(size)

    def hear(self):
        while True:
            if frames := list(self._decoder.feed(self.sealed.receive(1))):
                return frames[0]


class JoinedAgents:
    def __init__(self, status=None):
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.agents = [Agent(listener) for _ in range(2)]
        sockets = [agent.theirs for agent in self.agents]
        self.trouble: HvlaunchError | None = None
        self.connection = JoinedConnection("a", sockets, lambda _: status, lambda: self.trouble)
        self.program = AgentProgram({}, None)
        self.listener = FakeListener()
        self.channel = self.connection.start_agent(self.program, Host("a"), self.listener)
        self._frames = self.channel.frames()

    def frames(self, count):
        return [*islice(self._frames, count)]

    def close(self):
        self.connection.close()
        for agent in self.agents:
            agent.socket.close()
            agent.theirs.socket.close()


@pytest.fixture
def joined():
    with closing(JoinedAgents()) as joined:
        yield joined


def test_each_gets_the_program_and_then_its_frames(joined):
    assert joined.connection.local_address == joined.connection.remote_address == "127.0.0.1"
    joined.channel.send({"type": "hello", "rendezvous": 7}, b"")
    joined.channel.send({"type": "ping"}, b"")
    for agent, rendezvous in zip(joined.agents, (7, None), strict=True):
        assert agent.program() == joined.program.packed(is_near=True)
        assert agent.hear() == ({"type": "hello", "rendezvous": rendezvous}, b"")
        assert agent.hear() == ({"type": "ping"}, b"")


def test_why_we_hung_up_is_the_end(joined):
    joined.trouble = LauncherFailed("a stranger came", hint="ssh")
    joined.connection.close()
    with pytest.raises(AgentFailed, match="host a: a stranger came; try: ssh"):
        joined.frames(1)


def test_what_they_say_is_one_agents_words(joined):
    first, second = joined.agents
    second.say(HELLO)
    first.say(HELLO)
    output = {"type": "output", "slot": 1, "stream": "stdout", **ABOUT}
    assert joined.frames(1) == [(HELLO, b"")]
    assert joined.listener.heard == 1
    second.say(output, b"x" * 10_000)
    assert joined.frames(1) == [(output, b"x" * 10_000)]
    for agent in joined.agents:
        agent.say({"type": "bye", "left": 1})
        agent.socket.shutdown(socket.SHUT_RDWR)
    assert joined.frames(1) == [({"type": "bye", "left": 2}, b"")]
    assert joined.frames(1) == []
    assert joined.channel.stderr() == b""


def test_one_that_goes_without_a_word_is_the_end_of_all(joined):
    joined.agents[1].socket.close()
    assert joined.frames(1) == []
    assert joined.channel.stderr() == b"its agent of slot 1 is gone"


def test_one_changed_byte_ends_the_connection(joined):
    first, _ = joined.agents
    record = bytearray(first.sealed.seal(b"x" * 100))
    record[50] ^= 1
    first.socket.sendall(record)
    with pytest.raises(OSError, match=r"(?i)bad record mac|decryption failed"):
        joined.frames(1)


def test_what_was_said_before_is_not_taken_twice(joined):
    first, _ = joined.agents
    record = first.sealed.seal(b"".join(PieceWriter().cut(encode(HELLO))))
    first.socket.sendall(record + record)
    with pytest.raises(OSError, match=r"(?i)bad record mac|decryption failed"):
        joined.frames(1)


def test_closing_ends_a_read(joined):
    joined.connection.close()
    assert joined.frames(1) == []


@pytest.mark.parametrize(
    ("status", "code", "said"), [(3, 3, ", and then ended with exit code 3"), (None, 69, ""), (0, 69, "")]
)
def test_the_end_by_the_launcher_comes_behind_what_was_said_before(status, code, said):
    with closing(JoinedAgents(status)) as joined:
        agent = joined.agents[0]
        output = {"type": "output", "slot": 0, "stream": "stderr", **ABOUT}
        agent.say({"type": "parting", "cause": "got SIGTERM"})
        agent.say(output, b"last words")
        how = {
            "code": None,
            "signal": 15,
            "max_rss": 1,
            "at": 1.0,
            "oom_killed": False,
            "port_taken_by": None,
        }
        agent.say({"type": "exited", "slot": 0, **ABOUT, **how})
        assert joined.frames(1) == [(output, b"last words")]
        with pytest.raises(
            EndedByLauncher, match=f"host a: the launcher ended its processes{said}"
        ) as caught:
            joined.frames(1)
        assert caught.value.exit_code == code


def test_addresses_of_sockets_for_both_families():
    assert plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain("fd77::1") == "fd77::1"
