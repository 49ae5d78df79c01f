"""An agent behind a command: the program first, then frames in both directions, and noise."""

import sys
import zlib

import pytest

from hvlaunch.agent.wire.frames import BadFrame, PieceWriter, encode
from hvlaunch.driver.links.agent_channel import CommandConnection, Garbled
from hvlaunch.driver.program import AgentProgram
from hvlaunch.errors import BadUsage, HostError
from hvlaunch.job import Host
from tests.unit.gloo.fakes import FakeConnection, FakeListener

CONFIG = {"grace": 1.0, "lease": 30.0, "window": 1 << 20, "reconnect": 1.0, "spill": 0}
PING: dict[str, object] = {"type": "ping"}
PONG: dict[str, object] = {"type": "pong", "at": 1.0}
OUTPUT: dict[str, object] = {"type": "output", "round": 0, "slot": 0, "start": 0, "stream": "stdout"}


class Rig:
    def __init__(self, host: Host, python: str | None = None, **addresses: str | None) -> None:
        self.connection = FakeConnection()
        for name, address in addresses.items():
            setattr(self.connection, name, address)
        self.listener = FakeListener()
        self.program = AgentProgram(CONFIG, python, {"/opt/py"})
        self.channel = CommandConnection(self.connection).start_agent(self.program, host, self.listener)
        self.host = self.connection.channel


def test_program_is_sent_once_before_the_first_frame() -> None:
    rig = Rig(Host("a"))
    rig.channel.send((PING, b"x"))
    rig.channel.send((PING, b""))
    program = rig.program.packed(is_near=False)
    assert rig.host.written.startswith(program)
    assert rig.host.frames(len(program)) == [(PING, b"x"), (PING, b"")]
    assert f"read({len(program)})" in rig.connection.command
    assert b"hvlaunch.agent" in zlib.decompress(program)


def test_this_machine_gets_no_program_unless_another_python_runs_it() -> None:
    here = Rig(Host("a"), remote_address=None)
    here.channel.send((PING, b""))
    assert here.host.frames(0) == [(PING, b"")]
    assert sys.executable in here.connection.command
    for rig in (
        Rig(Host("a", python="/opt/py"), remote_address=None),
        Rig(Host("a"), "/opt/py", remote_address=None),
        Rig(Host("a", python="/opt/py"), "/other"),
    ):
        rig.channel.send((PING, b""))
        assert rig.host.written.startswith(rig.program.packed(is_near=False))
        assert '"/opt/py"' in rig.connection.command
        assert sys.executable not in rig.connection.command


def test_python_path_unsafe_in_a_shell_is_refused() -> None:
    with pytest.raises(BadUsage):
        Rig(Host("a", python="it's"))


def test_frames_arrive_when_complete_and_noise_is_separated() -> None:
    rig = Rig(Host("a"))
    frames = rig.channel.frames()
    pieces = b"".join(PieceWriter().cut(encode(OUTPUT, b"x" * 9000)))
    rig.host.say(b"Welcome!\n" + pieces[:5000], pieces[5000:])
    assert next(frames) == (OUTPUT, b"x" * 9000)
    assert rig.listener.noise == b"Welcome!\n"
    assert rig.listener.heard == 2  # a part of a frame is a sign of life


def test_noise_alone_is_no_sign_of_life() -> None:
    rig = Rig(Host("a"))
    rig.host.say(b"backup: 1 of 5\n")
    rig.host.frame(PONG)
    assert next(rig.channel.frames()) == (PONG, b"")
    assert rig.listener.noise == b"backup: 1 of 5\n"
    assert rig.listener.heard == 1


def test_invalid_bytes_raise_an_error_after_the_valid_frames() -> None:
    rig = Rig(Host("a"))
    rig.host.say(b"".join(rig.host.writer.cut(encode(PONG) + b"\xff" * 100)))
    frames = rig.channel.frames()
    assert next(frames) == (PONG, b"")
    with pytest.raises(BadFrame):
        next(frames)


def test_a_frame_that_does_not_fit_its_form_is_an_error() -> None:
    rig = Rig(Host("a"))
    rig.host.frame(OUTPUT | {"stream": "../../.bashrc"}, b"x")
    with pytest.raises(BadFrame, match="a frame of type output with a wrong stream"):
        next(rig.channel.frames())


def test_noise_within_a_piece_is_an_error_of_its_own() -> None:
    rig = Rig(Host("a"))
    pieces = b"".join(rig.host.writer.cut(encode(PONG)))
    rig.host.say(pieces[:20] + b"noise" + pieces[20:])
    with pytest.raises(Garbled):
        next(rig.channel.frames())


def test_end_has_exit_status_and_stderr() -> None:
    rig = Rig(Host("a"))
    rig.host.end(3, b"oops\n")
    assert list(rig.channel.frames()) == []
    assert (rig.channel.exit_status(1.0), rig.channel.stderr()) == (3, b"oops\n")


def test_discovered_python_does_not_run_on_this_machine() -> None:
    with pytest.raises(
        HostError,
        match="python=/tmp/py was found while the job runs, and may not name a program of this machine",
    ):
        Rig(Host("a", python="/tmp/py"), remote_address=None)
    assert '"/tmp/py"' in Rig(Host("a", python="/tmp/py")).connection.command
