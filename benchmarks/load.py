"""Load for key-value servers: the same cheap client for all, in a process of its own.

    python benchmarks/load.py < PLAN

PLAN is one line of JSON (see Plan), and so is the answer (see Done). Each connection does the steps of its round
over and over: sends a step's bytes, reads as many as the step's reply has. So a step costs the client one event
of epoll(7), one recv and one send, whatever the server; which protocol it is, the client doesn't know.
"""

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Done", "Plan", "Step", "cpu_of"]

_CHUNK = 1 << 16
_PATIENCE = 30.0
_LEAST_CPU = 0.2  # seconds of the server: what is known of them is known to 0.01
_SOURCES = 8  # addresses that connections come from: one has only 28,000 ports, which rest after use


@dataclass(frozen=True, slots=True)
class Step:
    """One request and its reply: `reply` bytes come back, and begin with `begins`. Bytes are in Latin-1."""

    send: str
    begins: str
    reply: int


@dataclass(frozen=True, slots=True)
class Plan:
    """For `seconds` at least: `connections` to 127.0.0.1:`port` that do `greeting` once, then `round` over and over.

    Where they are not `kept`, each step has a connection of its own. `pid` is the server.
    """

    port: int
    pid: int
    connections: int
    seconds: float
    greeting: Sequence[Step]
    round: Sequence[Step]
    kept: bool


@dataclass(frozen=True, slots=True)
class Done:
    """What was done from the moment when each kept connection had done a round until the end, in seconds.

    `failures` are connections that were reset; where they are not kept, another takes their place.
    """

    rounds: float
    failures: int
    seconds: float
    client_cpu: float
    server_cpu: float


def cpu_of(pid: int) -> float:
    """Seconds of CPU that the process and all its threads, also those that ended, have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Steps = list[tuple[bytes, bytes, int]]


class _Connection:
    """One step after the other; a new socket for each where they are not kept."""

    __slots__ = ("at", "begins", "got", "number", "reply", "socket", "steps", "where")

    def __init__(self, number: int, where: tuple[str, int], steps: Steps) -> None:
        self.number = number
        self.where = where
        self.steps = steps
        self.at = 0

    def connect(self) -> int:
        """Begin to; it is done as soon as the socket can be written to."""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.bind((f"127.0.1.{self.number % _SOURCES + 1}", 0))
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(self.where)
        return self.socket.fileno()

    def send_next(self) -> None:
        send, self.begins, self.reply = self.steps[self.at]
        self.got = 0
        self.socket.send(send)

    def received(self) -> bool:
        """Read what is there; whether the step is done."""
        piece = self.socket.recv(_CHUNK)
        if not piece or not (self.got or piece.startswith(self.begins)):
            raise SystemExit(f"step {self.at} of connection {self.number} was answered with {piece!r}")
        self.got += len(piece)
        return self.got >= self.reply


class Load:
    """All the connections."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.greeting = [_packed(step) for step in plan.greeting]
        self.round = [_packed(step) for step in plan.round]
        self.epoll = select.epoll()
        self.open: dict[int, _Connection] = {}
        self.steps = 0
        self.failures = 0
        # A server whose queue is short leaves short connections out for many seconds: they are not waited for.
        self.new = plan.connections if plan.kept else 0
        """How many connections have not done a round yet."""
        for number in range(plan.connections):
            steps = self.greeting + self.round
            self._begin(_Connection(number, ("127.0.0.1", plan.port), steps))

    def _begin(self, connection: _Connection) -> None:
        fd = connection.connect()
        self.open[fd] = connection
        self.epoll.register(fd, select.EPOLLOUT)

    def _renew(self, fd: int) -> None:
        connection = self.open.pop(fd)
        connection.socket.close()
        self._begin(connection)

    def _go_on_for(self, seconds: float) -> float:
        """Do steps for so long, and until each kept connection has done a round; tells how long it was."""
        kept, wait, open_, count = self.plan.kept, self.epoll.poll, self.open, 0
        begun = now = time.monotonic()
        while now - begun < seconds or self.new:
            events = wait(_PATIENCE)
            if not events:
                raise SystemExit(f"no answer for {_PATIENCE:g} s")
            for fd, event in events:
                connection = open_[fd]
                if event & select.EPOLLOUT:
                    self.epoll.modify(fd, select.EPOLLIN)
                    connection.send_next()
                    continue
                try:
                    if not connection.received():
                        continue
                except ConnectionResetError:
                    if kept:
                        raise
                    self.failures += 1
                    self._renew(fd)
                    continue
                count += 1
                connection.at += 1
                if connection.at == len(connection.steps):
                    self.new -= self.plan.kept and connection.steps is not self.round
                    connection.at, connection.steps = 0, self.round
                if kept:
                    connection.send_next()
                else:
                    self._renew(fd)
            now = time.monotonic()
        self.steps += count
        return now - begun

    def run(self) -> Done:
        self._go_on_for(0.2)
        client, server = cpu_of(os.getpid()), cpu_of(self.plan.pid)
        self.steps = self.failures = 0
        seconds = used = 0.0
        while seconds < self.plan.seconds or (used < _LEAST_CPU and seconds < _PATIENCE):
            seconds += self._go_on_for(self.plan.seconds)
            used = cpu_of(self.plan.pid) - server
        client = cpu_of(os.getpid()) - client
        return Done(self.steps / len(self.round), self.failures, seconds, client, used)


def _packed(step: Step) -> tuple[bytes, bytes, int]:
    return step.send.encode("latin-1"), step.begins.encode("latin-1"), step.reply


def main() -> None:
    given = json.loads(sys.stdin.read())
    for name in ("greeting", "round"):
        given[name] = [Step(**step) for step in given[name]]
    print(json.dumps(asdict(Load(Plan(**given)).run())))


if __name__ == "__main__":
    main()
