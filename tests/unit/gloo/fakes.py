"""A connection with the test as its host."""

from collections import deque
from threading import Condition
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.frames import PROTOCOL, Decoder, PieceWriter, encode

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = ["FACTS", "HELLO", "FakeChannel", "FakeConnection", "FakeListener"]

FACTS = {
    "hostname": "a",
    "python": "3.11.2",
    "executable": "/usr/bin/python3",
    "kernel": "6.1.0",
    "boot_id": "b",
    "machine_id": None,
    "cpus": 4,
    "memory": 1 << 34,
    "addresses": {"lo": ["127.0.0.1"]},
    "clock": 1e9,
}
HELLO = {
    "type": "hello",
    "protocol": PROTOCOL,
    "facts": FACTS,
    "scratch": "/tmp/x",
    "beacon_port": 1,
    "master_port": 2,
    "cwd_error": None,
    "trouble": None,
}


class FakeChannel:
    """say() prints as the host; bytes of the driver are kept."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.writer = PieceWriter()
        self.incoming: deque[bytes | Exception] = deque()
        self.written = bytearray()
        self.status: int | None = None
        self.errors = b""
        self.closed = False

    def say(self, *parts: bytes) -> None:
        with self.changed:
            self.incoming.extend(parts)
            self.changed.notify_all()

    def frame(self, header: dict[str, object], body: bytes = b"") -> None:
        self.say(b"".join(self.writer.cut(encode(header, body))))

    def greet(self, **changes: object) -> None:
        self.frame(HELLO | changes)

    def end(self, status: int = 0, errors: bytes = b"") -> None:
        self.status, self.errors = status, errors
        self.say(b"")

    def break_off(self, error: OSError) -> None:
        with self.changed:
            self.incoming.append(error)
            self.changed.notify_all()

    def frames(self, skip: int) -> list["Frame"]:
        """Return the driver's frames, after `skip` bytes of the bundle."""
        return list(Decoder().feed(bytes(self.written[skip:])))

    def read(self) -> bytes:
        with self.changed:
            self.changed.wait_for(lambda: self.incoming or self.closed)
            if not self.incoming:
                raise OSError("closed")
            item = self.incoming.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def write(self, data: bytes) -> None:
        with self.changed:
            if self.closed:
                raise OSError("closed")
            self.written += data
            self.changed.notify_all()

    def stderr(self) -> bytes:
        return self.errors

    def exit_status(self, timeout: float) -> int | None:
        return self.status

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class FakeConnection:
    local_address: str | None = "10.0.0.100"
    remote_address: str | None = "10.0.0.1"
    is_near = False

    def __init__(self) -> None:
        self.channel = FakeChannel()
        self.command = ""

    def run(self, command: str) -> FakeChannel:
        self.command = command
        return self.channel

    def silence(self) -> None:
        return None

    def close(self) -> None:
        self.channel.close()


class FakeListener:
    def __init__(self) -> None:
        self.heard = 0
        """Count arrivals of the agent's bytes."""
        self.noise = b""

    def heard_agent(self) -> None:
        self.heard += 1

    def heard_noise(self, data: bytes) -> None:
        self.noise += data
