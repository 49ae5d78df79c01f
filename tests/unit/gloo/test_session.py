"""The driver's end of a session with a real agent, which loses its pipes and gets a carrier."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import PROTOCOL
from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.driver.links.session import HostSession
from hvlaunch.driver.program import AgentProgram
from hvlaunch.engine import events as on
from hvlaunch.job import Host
from hvlaunch.ssh import connect_local
from tests.unit.gloo.fakes import FakeListener

CONFIG = {"grace": 1.0, "lease": 60.0, "window": 1 << 20, "reconnect": 60.0, "spill": 0}
HELLO: dict[str, Any] = {
    "type": "hello",
    "protocol": PROTOCOL,
    "name": "here",
    "key": "k",
    "known_as": None,
    "cwd": "/",
    "gpus": False,
    "ports": None,
    "elastic": None,
    "processes": 1,
    "rendezvous": None,
    "session": "the session's key",
}


class Rig:
    """A session with an agent of this machine, run by `python`; None is this Python, from the files of hvlaunch."""

    def __init__(self, python: str | None = None, patience: float = 60.0) -> None:
        self.host = Host("here", python=python)
        self.connections: list[CommandConnection] = []
        self.events: SimpleQueue[on.Event] = SimpleQueue()
        program = AgentProgram(CONFIG, None, {python or ""})
        self.session = HostSession(
            self.host, program, FakeListener(), self.events.put, time.monotonic, patience=patience
        )
        connect: Callable[..., Any] = lambda _timeout=None: connect_local(self.host)  # noqa: E731 (it is passed on)
        self.connection = CommandConnection(connect(), connect)
        self.session.begin(self.connection)
        self.session.greet(HELLO)
        self.frames = self.session.frames()

    def part(self) -> None:
        """Wait for the agent's bye, while its hello is not acknowledged."""
        self.session.send({"type": "bye"})
        self.next("bye")
        self.session.acknowledge()
        self.session.ping()
        self.next("pong")

    def next(self, kind: str) -> Any:
        """Return the next frame of the kind."""
        return next(header for header, _ in self.frames if header["type"] == kind)


@contextmanager
def rig(python: str | None = None, patience: float = 60.0) -> Iterator[Rig]:
    it = Rig(python, patience)
    with closing(it.session):
        it.session.scratch = it.next("hello")["scratch"]
        it.session.ping()
        it.next("pong")  # its socket is there
        yield it


@pytest.mark.parametrize("python", [None, sys.executable], ids=["files", "sent"])
def test_agent_of_this_machine_continues_over_a_carrier(python: str | None) -> None:
    with rig(python) as it:
        it.connection.close()
        it.session.send({"type": "bye"})
        assert it.next("bye")["left"] == 0
        assert isinstance(it.events.get(timeout=60), on.HostAway)
        assert isinstance(it.events.get(timeout=60), on.HostBack)


def test_agent_ends_when_all_before_its_bye_is_acknowledged() -> None:
    with rig() as it:
        it.part()
        it.session.acked.add(1)
        it.session.acknowledge()
        assert next(it.frames, None) is None
        assert it.session.status == 0


def test_agent_after_bye_gets_its_acknowledgement_over_a_carrier() -> None:
    with rig() as it:
        it.part()
        it.connection.close()
        it.session.acked.add(1)
        assert next(it.frames, None) is None
        assert [type(it.events.get(timeout=60)) for _ in range(2)] == [on.HostAway, on.HostBack]
        assert it.session.status == 0  # the carrier's: it has waited for the agent's end


def test_second_connection_may_break_in_its_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time: the next connection finds out if the agent is still there."""
    shake_hands = HostSession._shake_hands
    failures = iter([OSError("the connection was reset"), StopIteration()])

    def break_first(session: HostSession, candidate: Any) -> Any:
        for error in failures:
            raise error
        return shake_hands(session, candidate)

    monkeypatch.setattr(HostSession, "_shake_hands", break_first)
    with rig(patience=0.0) as it:
        it.connection.close()
        it.session.send({"type": "bye"})
        assert it.next("bye")["left"] == 0
