"""A link to a host played by the test."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hvlaunch.driver.job_record import FrameRecord
from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.driver.links.host_link import HostLink, Opening
from hvlaunch.driver.links.relay import HostRelay
from hvlaunch.driver.program import AgentProgram
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import events as on
from hvlaunch.job import Host
from tests.unit.gloo.fakes import FakeConnection

__all__ = ["BUNDLE", "WINDOW", "Rig"]

BUNDLE = b"BUNDLE"
WINDOW = 3000


class Sink:
    def __init__(self) -> None:
        self.got: list[tuple[int, str, bytes]] = []
        self.dones: list[Callable[[int], None]] = []

    def output(
        self,
        rank: int,
        stream: str,
        data: bytes,
        done: Callable[[int], None],
        origin: tuple[str, int],
        note: Callable[[bool], None] | None,
    ) -> None:
        self.got.append((rank, stream, data))
        self.dones.append(done)

    def tail(self, rank: int) -> bytes:
        return b"".join(data for of, stream, data in self.got if (of, stream) == (rank, "stderr"))

    def end_stream(self, rank: int, stream: str, done: Any, origin: tuple[str, int]) -> None:
        self.got.append((rank, stream, b"END"))


class Program(AgentProgram):
    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        return "start the agent", BUNDLE


class FakeRelay(HostRelay):
    """Sends every frame back."""

    def __init__(self, rig: "Rig", send: Callable[[Any, bytes], None]) -> None:
        self._send = send
        self.closed = threading.Event()
        rig.relays.append(self)

    def obey(self, header: Any, body: bytes) -> None:
        self._send(header, body)

    def close(self) -> None:
        self.closed.set()


class Rig:
    """A link to a host played by the test."""

    def __init__(self, connect: Callable[[Host], Any] | None = None, **hello: Any) -> None:
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.sink = Sink()
        self.connection = FakeConnection()
        self.channel = self.connection.channel
        self.now = 50.0
        self.relays: list[FakeRelay] = []
        where = {"candidates": [["10.0.0.9", 1]], "key": "k", "relay": "auto"}
        self.hello: dict[str, Any] = {
            "type": "hello",
            "gpus": False,
            "ports": None,
            "elastic": None,
            "session": None,
        }
        self.hello |= {"rendezvous": where, **hello}
        opening = Opening(
            connect=connect or (lambda _host: CommandConnection(self.connection)),
            program=Program({}, None),
            hello=lambda connection: self.hello | {"cwd": connection.local_address},
            relay=lambda send: FakeRelay(self, send),
            window=WINDOW,
            frame_record=FrameRecord(memoryview(bytearray(32)).cast("Q")),
        )
        self.ranks: dict[tuple[int, int], int] = {}
        """By slot and start."""

        def rank_of(slot: int, start: int) -> int | None:
            return self.ranks.get((slot, start))

        def born(slot: int, start: int) -> int | None:
            return 0 if (slot, start) in self.ranks else None

        self.link = HostLink(Host("a"), opening, self.events.put, self.sink, rank_of, born, lambda: self.now)
        self.link.open()

    def event(self) -> Any:
        """Return the next event, as if recorded."""
        event = self.events.get(timeout=60)
        if isinstance(event, Arrival):
            self.link.acknowledge(event.frame)
            return event.event
        return event

    def ready(self) -> "Rig":
        assert self.event() == on.HostConnected("a")
        self.channel.greet()
        assert isinstance(self.event(), on.HostReady)
        return self

    def start(self, slot: int, start: int) -> None:
        """Let the agent report a started worker."""
        about = {"round": 0, "slot": slot, "start": start}
        self.channel.frame({"type": "started", "pid": 3, "at": 0.0, **about})
        assert self.event() == on.WorkerStarted("a", 0, slot, 3, start)

    def settle(self) -> None:
        """Wait until the link has read the agent's frames so far."""
        self.channel.frame({"type": "reached", "address": "10.0.0.9", "tried": [], "relay_port": None})
        assert isinstance(self.event(), on.RendezvousReached)

    def sent(self, count: int | None = None) -> list[Any]:
        """Return the first `count` frames of the driver, or the frames so far, without the modules behind the hello."""
        channel = self.channel

        def sent() -> list[Any]:
            return [header for header, _ in channel.frames(len(BUNDLE)) if header["type"] != "modules"]

        with channel.changed:
            assert channel.changed.wait_for(lambda: len(sent()) >= (count or 0), timeout=60)
            return sent()[:count]
